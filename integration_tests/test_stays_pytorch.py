"""A tensor-parallel model stays a PyTorch module: what users do to modules works as before.

A program runs on one device and on every rank, and must note the same.
"""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_dtensor import DTensor
from vescale_testing import World

from .families import LENGTH, ROWS, VOCABULARY, InDouble, make, tokens
from .models import HandWritten
from .plans import SEQUENCE, TP

Built = tuple[Any, dict[str, Any]]


@dataclass(kw_only=True)
class Run:
    """One program on one device, or on one rank.

    Attributes:
        kind: A key of ``KINDS``.
        plan: As JSON; None on one device.
        notes: What the program noted, in order, each leaf with its path.
    """

    kind: str
    plan: str | None
    notes: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    def build(self) -> Built:
        torch.manual_seed(3)
        return KINDS[self.kind]()

    def parallelize(self, model: nn.Module, *optimizer: Callable[[Any], Any]) -> Any:
        if self.plan is not None:
            plan = vescale.ParallelPlan.from_json(self.plan)
            return vescale.parallelize(plan, model, *optimizer)
        return (model, optimizer[0](model)) if optimizer else model

    def start(self) -> Built:
        model, call = self.build()
        return self.parallelize(model), call

    def note(self, *values: Any) -> None:
        self.notes += leaves(values)

    def note_gradients(self, model: nn.Module) -> None:
        self.note({name: p.grad for name, p in model.named_parameters()})

    def named(self, part: str) -> str:
        """Return the FQN that a part of the model has."""
        return (LLAMA_PARTS if self.kind == "llama" else PARTS)[part]


PARTS = {"embed": "embed", "block": "blocks.1", "up": "blocks.1.mlp.0", "norm": "norm"}
LLAMA_PARTS = {
    "embed": "model.embed_tokens", "block": "model.layers.1",
    "up": "model.layers.1.mlp.up_proj", "norm": "model.norm",
}  # fmt: skip
WHOLE_PARTS = ("embed", "block", "norm")  # outside of regions


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return what is in containers, tensors whole, without autograd, and as they are now."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return [(path, whole(value))]
    return [leaf for name, each in value.items() for leaf in leaves(each, f"{path}/{name}")]


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def loss_of(model: nn.Module, call: Mapping[str, Any]) -> Tensor:
    output = model(**call)
    loss = output if isinstance(output, Tensor) else output.loss
    assert type(loss) is Tensor
    return loss


class Adapter(nn.Module):
    """A frozen linear layer and a trained product of two thin ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LossInParts(HandWritten):
    """Recomputes its logits in backward, half of the rows at a time, with a learned scale."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__(vocabulary=VOCABULARY, depth=2)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def total(self, x_BSF: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV = self.head(self.norm(x_BSF)) * self.scale
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x_BSF, labels_BS = self.embed(batch["input_ids"]), batch["labels"]
        for block in self.blocks:
            x_BSF, _ = block(x_BSF)
        halves = zip(x_BSF.chunk(2), labels_BS.chunk(2), strict=True)
        totals = [checkpoint(self.total, *h, use_reentrant=self.use_reentrant) for h in halves]
        return (totals[0] + totals[1]) / (labels_BS != -100).sum()


class LossInPartsReentrant(LossInParts):
    use_reentrant = True


def adapted() -> Built:
    model, call = make("nanogpt")
    model.requires_grad_(False)
    blocks: Any = model.blocks
    for block in blocks:
        block.mlp[0], block.mlp[2] = Adapter(block.mlp[0]), Adapter(block.mlp[2])
    return model.double(), call


KINDS: dict[str, Callable[[], Built]] = {
    "nanogpt": lambda: make("nanogpt"),
    "llama": lambda: make("llama"),
    "adapted": adapted,
    "loss_in_parts": lambda: (LossInParts().double(), {"batch": tokens()}),
    "loss_in_parts_reentrant": lambda: (LossInPartsReentrant().double(), {"batch": tokens()}),
}
Program = Callable[[Run], None]


@cache
def planned(kind: str, sequence: bool) -> str:
    model, call = Run(kind=kind, plan=None).build()
    constraints = {TP: 2, SEQUENCE: sequence}
    plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=call)
    assert any("Shard" in text for text in plan.tensor_parallel.sharding_plan.values())
    return plan.to_json()


def notes_of(program: Program, kind: str, plan: str | None) -> list[tuple[str, Any]]:
    run = Run(kind=kind, plan=plan)
    with InDouble():
        program(run)
    return run.notes


def check(world: World, program: Program, kind: str, *, sequence: bool = False) -> None:
    expected = notes_of(program, kind, None)
    assert any(isinstance(value, Tensor) for _, value in expected)
    for found in world.run(notes_of, program, kind, planned(kind, sequence)):
        assert [path for path, _ in found] == [path for path, _ in expected]
        for (path, one), (_, other) in zip(found, expected, strict=True):
            if isinstance(other, Tensor):
                # Float64, summed in another order: small elements are sums of large ones.
                close = 1e-12 * float(other.abs().max()) + 1e-15
                torch.testing.assert_close(one, other, rtol=1e-11, atol=close, msg=path)
            else:
                assert one == other, path


def breakpoints(run: Run) -> None:
    """Stops inside of a block's own forward."""
    frames: list[Any] = []

    def stop() -> None:
        frame = sys._getframe(1)
        local = frame.f_locals
        if type(local["doubled"]) is not Tensor:
            return  # fake: a dry run of the model
        frames.append((frame.f_code.co_name, sorted(local), local["doubled"].detach().clone()))

    model, call = run.build()
    block = model.get_submodule(run.named("block"))
    own = type(block).forward

    def forward(self: nn.Module, x_BSF: Tensor, **kwargs: Any) -> Any:
        doubled = x_BSF * 2
        breakpoint()  # noqa: T100
        return own(self, doubled, **kwargs)

    block.__class__ = type("Stopping", (type(block),), {"forward": forward})
    held, sys.breakpointhook = sys.breakpointhook, stop
    try:
        model = run.parallelize(model)
        loss_of(model, call).backward()
    finally:
        sys.breakpointhook = held
    run.note(frames)


def first_tensor(value: Any) -> Tensor:
    return next(leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def add_hooks(module: nn.Module, name: str, events: list[Any]) -> None:
    def seen(hook: str, *values: Any) -> None:
        events.append((name, hook, [first_tensor(value) for value in values]))

    def forward(_: nn.Module, args: Any, output: Any) -> None:
        seen("forward", output)
        # What models, blocks and layers return begins with the tensor that goes on.
        while not isinstance(output, Tensor):
            output = next(iter(output.values() if isinstance(output, Mapping) else output))
        output.register_hook(lambda grad: seen("tensor", grad))

    module.register_forward_pre_hook(
        lambda _, args, kwargs: seen("pre", (args, kwargs)), with_kwargs=True
    )
    module.register_forward_hook(forward)
    module.register_forward_hook(
        lambda _, args, kwargs, out: seen("kwargs", (args, kwargs), out), with_kwargs=True
    )
    if name in ("", "embed"):
        return  # their inputs have no gradients
    module.register_forward_pre_hook(lambda _, args: seen("pre args", args))
    module.register_full_backward_pre_hook(lambda _, grads: seen("backward pre", grads))
    module.register_full_backward_hook(lambda _, inputs, grads: seen("backward", inputs, grads))


def hooks(run: Run) -> None:
    """Adds hooks of every kind before and after parallelize."""
    model, call = run.build()
    events: list[Any] = []
    modules = {part: model.get_submodule(run.named(part)) for part in WHOLE_PARTS} | {"": model}
    for name, module in modules.items():
        add_hooks(module, name, events)
    model = run.parallelize(model)
    for name, module in modules.items():
        add_hooks(module, name, events)
    loss_of(model, call).backward()
    run.note(events)
    run.note_gradients(model)


def checkpointed(run: Run, *, use_reentrant: bool) -> None:
    model, call = run.build()
    block = model.get_submodule(run.named("block"))
    own = block.forward
    block.forward = lambda x_BSF: checkpoint(own, x_BSF, use_reentrant=use_reentrant)
    train(run, run.parallelize(model), call)


def train(run: Run, model: nn.Module, call: Mapping[str, Any]) -> None:
    loss = loss_of(model, call)
    loss.backward()
    run.note(loss)
    run.note_gradients(model)


def block_recomputed(run: Run) -> None:
    checkpointed(run, use_reentrant=False)


def block_recomputed_reentrant(run: Run) -> None:
    checkpointed(run, use_reentrant=True)


def plain_training(run: Run) -> None:
    train(run, *run.start())


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def own_function(run: Run) -> None:
    """Cubes between a column- and a row-wise linear."""
    model, call = run.build()
    up = model.get_submodule(run.named("up"))
    own = up.forward
    up.forward = lambda x_BSF: Cube.apply(own(x_BSF))
    train(run, run.parallelize(model), call)


def functional_with_own_parameters(run: Run) -> None:
    model, call = run.start()
    output = torch.func.functional_call(model, dict(model.named_parameters()), (), call)
    (output if isinstance(output, Tensor) else output.loss).backward()
    run.note_gradients(model)


def functional_inside(run: Run) -> None:
    """Runs a cut layer with other weights in forward of what it is in."""
    model, call = run.build()
    mlp = model.get_submodule(run.named("up").rpartition(".")[0])
    up, activation, down = mlp

    def forward(x_BSF: Tensor) -> Tensor:
        twice = {name: 2 * p for name, p in up.named_parameters()}
        return down(activation(torch.func.functional_call(up, twice, (x_BSF,))))

    mlp.forward = forward
    train(run, run.parallelize(model), call)


def loading(run: Run) -> None:
    model, call = run.start()
    other, _ = run.build()
    state = {name: value * 1.5 for name, value in other.state_dict().items()}
    run.note(str(model.load_state_dict(state)), loss_of(model, call))
    run.note(model.state_dict(), {n: tuple(v.shape) for n, v in model.state_dict().items()})
    first = next(iter(state))
    wrong = {name: value for name, value in state.items() if name != first}
    wrong |= {"other.weight": torch.zeros(1), run.named("norm") + ".weight": torch.zeros(3)}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(wrong)
    run.note(str(error.value))
    del wrong[run.named("norm") + ".weight"]
    run.note(str(model.load_state_dict(wrong, strict=False)))
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    run.note(str(model.load_state_dict(saved)), loss_of(model, call))


def optimizer_state(run: Run) -> None:
    """Goes back to the state after the first step, and on again."""
    model, call = run.build()
    # A large eps: gradients that are zero but for rounding do not decide about a step.
    model, optimizer = run.parallelize(model, lambda m: AdamW(m.parameters(), eps=1e-3))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, call).backward()
        optimizer.step()
        run.note(model.state_dict())

    step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step()


def evaluation(run: Run) -> None:
    model, call = run.start()
    for without_gradients in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with without_gradients():
            output = model.eval()(**call)
            run.note(output if isinstance(output, Tensor) else output.logits)
        model.train()
        loss = loss_of(model, call)
        loss.backward()
        run.note(loss)
    run.note_gradients(model)


def accumulation(run: Run) -> None:
    model, call = run.start()
    for _ in range(2):
        loss_of(model, call).backward()
    run.note_gradients(model)
    loss = loss_of(model, call)
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    run.note_gradients(model)


def embedding_gradient(run: Run) -> None:
    model, call = run.start()
    x_BSF = torch.linspace(-1, 1, ROWS * LENGTH * 32).view(ROWS, LENGTH, 32).double()
    x_BSF.requires_grad_(True)
    loss = model(inputs_embeds=x_BSF, labels=call["labels"]).loss
    run.note(torch.autograd.grad(loss, x_BSF))
    run.note_gradients(model)
    model(inputs_embeds=x_BSF, labels=call["labels"]).loss.backward()
    run.note(x_BSF.grad)
    run.note_gradients(model)


def generation(run: Run) -> None:
    model, call = run.start()
    ids_BS = call["input_ids"][:2, :5]
    ways = [{"use_cache": True}, {"use_cache": False}, {"num_beams": 2}, {"do_sample": True}]
    for way in ways:
        torch.manual_seed(0)
        options = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False, **way}
        found = model.eval().generate(ids_BS, **options)
        assert type(found) is Tensor
        run.note(found)
    train(run, model.train(), call)


def generation_by_hand(run: Run) -> None:
    model, call = run.start()
    ids_BS = call["input_ids"][:2, :5]
    for _ in range(3):
        with torch.no_grad():
            chosen_B1 = model(ids_BS).logits[:, -1].argmax(-1, keepdim=True)
        ids_BS = torch.cat([ids_BS, chosen_B1], 1)
    run.note(ids_BS)


def frozen(run: Run) -> None:
    """Trains some parameters, then others."""
    model, call = run.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or name.startswith(run.named("up")))
    model = run.parallelize(model)
    loss_of(model, call).backward()
    run.note_gradients(model)
    model.get_submodule(run.named("embed")).requires_grad_(True)
    model.get_submodule(run.named("up")).requires_grad_(False)
    model.zero_grad()
    loss_of(model, call).backward()
    run.note_gradients(model)


def unused(run: Run) -> None:
    """Leaves out a block in one call."""
    model, call = run.build()
    block = model.get_submodule(run.named("block"))
    own, is_used = block.forward, [False]
    block.forward = lambda x_BSF: own(x_BSF) if is_used else (x_BSF, None)
    model = run.parallelize(model)
    is_used.clear()
    loss_of(model, call).backward()
    run.note_gradients(model)
    is_used.append(True)
    loss_of(model, call).backward()
    run.note_gradients(model)


def keyword_embedding(run: Run) -> None:
    """Calls its embedding with a keyword."""
    model, call = run.build()

    class Named(nn.Embedding):
        def __call__(self, ids_BS: Tensor) -> Tensor:
            return super().__call__(input=ids_BS)

    model.get_submodule(run.named("embed")).__class__ = Named
    train(run, run.parallelize(model), call)


ANY = [
    block_recomputed, block_recomputed_reentrant, own_function, functional_with_own_parameters,
    functional_inside, loading, optimizer_state, evaluation, accumulation, frozen, unused,
    keyword_embedding,
]  # fmt: skip
FOR_LLAMA = [embedding_gradient, generation, generation_by_hand, evaluation]
either_sequence = pytest.mark.parametrize("sequence", [False, True])


@pytest.mark.by_day(
    "block_recomputed_reentrant-False",
    "block_recomputed_reentrant-True",
    "own_function-False",
    "own_function-True",
    "functional_with_own_parameters-False",
    "functional_with_own_parameters-True",
    "functional_inside-False",
    "functional_inside-True",
    "loading-False",
    "loading-True",
    "optimizer_state-False",
    "optimizer_state-True",
    "evaluation-False",
    "accumulation-False",
    "accumulation-True",
    "frozen-False",
    "frozen-True",
    "unused-False",
    "unused-True",
    "keyword_embedding-False",
    "keyword_embedding-True",
)
@pytest.mark.slow
@either_sequence
@pytest.mark.parametrize("program", ANY)
def test_what_a_module_can_do_it_does_on_ranks(
    world2: World, program: Program, sequence: bool
) -> None:
    check(world2, program, "nanogpt", sequence=sequence)


@pytest.mark.by_day("generation_by_hand-True", "evaluation-False", "evaluation-True")
@pytest.mark.slow
@either_sequence
@pytest.mark.parametrize("program", FOR_LLAMA)
def test_what_a_model_of_transformers_can_do_it_does_on_ranks(
    world2: World, program: Program, sequence: bool
) -> None:
    check(world2, program, "llama", sequence=sequence)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nanogpt", "llama"])
@pytest.mark.parametrize("program", [breakpoints, hooks])
def test_whole_activations_are_seen_outside_of_regions(
    world2: World, program: Program, kind: str
) -> None:
    check(world2, program, kind)


@pytest.mark.by_day("loss_in_parts", "loss_in_parts_reentrant")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapted", "loss_in_parts", "loss_in_parts_reentrant"])
def test_training_is_that_of_one_device(world2: World, kind: str) -> None:
    check(world2, plain_training, kind)


def doubled(module: nn.Module) -> dict[str, Tensor]:
    return {name: 2 * p.detach() for name, p in module.named_parameters()}


def doubled_whole(module: nn.Module) -> dict[str, Any]:
    return {name: whole(p) for name, p in doubled(module).items()}


X = torch.ones(2, 24, dtype=torch.float64)
functional_call = torch.func.functional_call
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pickle": (pickle.dumps, "TypeError: .* cannot be pickled.*state_dict"),
    "functional": (
        lambda model: functional_call(model, doubled(model), ({},)),
        "ValueError: .*replaced after parallelize, by functional_call.*copy_",
    ),
    "functional_part": (
        lambda model: functional_call(model.blocks[0].mlp, doubled(model.blocks[0].mlp), (X,)),
        "ValueError: .*blocks.0.mlp.*outside",
    ),
    "functional_part_whole": (
        lambda model: functional_call(
            model.blocks[0].mlp, doubled_whole(model.blocks[0].mlp), (X,)
        ),
        "ValueError: .*blocks.0.mlp.*another parameter",
    ),
    "part": (lambda model: model.blocks[1](X[None]), "ValueError: .*blocks.1.*outside"),
    "embedding": (lambda model: model.embed(tokens()["input_ids"]), "ValueError: .*embed.weight"),
    "head": (lambda model: model.head(X), "ValueError: .*head.*outside"),
    "no_row": (
        lambda model: model({"input_ids": torch.tensor([[VOCABULARY]]), "labels": X}),
        "IndexError: index out of range",
    ),
}


def message(name: str, plan: str) -> str:
    model, call = Run(kind="nanogpt", plan=plan).start()
    try:
        REFUSED[name][0](model)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        # The model is as it was.
        loss_of(model, call).backward()
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.by_day(
    "pickle-False",
    "pickle-True",
    "functional-False",
    "functional_part-False",
    "functional_part-True",
    "functional_part_whole-False",
    "part-False",
    "part-True",
    "embedding-False",
    "embedding-True",
    "head-False",
    "no_row-True",
)
@pytest.mark.slow
@either_sequence
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(world2: World, name: str, sequence: bool) -> None:
    for found in world2.run(message, name, planned("nanogpt", sequence)):
        assert re.search(REFUSED[name][1], found), found
