"""Random numbers under pipelines: those of one device, one micro-batch after the other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)

import vescale
from vescale_ckpt import RngState
from vescale_testing import World

from .models import batches
from .plans import DP, PARTS, PP, SCHEDULE, TP, VIRTUAL, ZERO, Constraints, make_plan
from .test_pipeline_schedules import Loss
from .training import whole

STEPS, ROWS, LENGTH = 2, 8, 6


class DropPath(nn.Module):
    """Leaves out a branch for some rows."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - self.p)
        return x * keep / (1 - self.p)


class Block(nn.Module):
    """Draws in three ways, normals one by one among them, of which a generator keeps a spare."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.path, self.dropout = DropPath(p), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.gelu(self.up(x)))
        if self.training:
            y = (
                y * (1 + 0.1 * torch.rand(y.shape[-1], device=y.device))
                + 0.1 * torch.randn(3, device=y.device).sum()
            )
        return x + self.path(F.dropout(self.down(y), 0.1, self.training))


class HandWritten(nn.Module):
    """Draws before its blocks, in them, between them and behind them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(37, 8), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(8, 0.2 * i / depth) for i in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 37))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        x = self.drop(self.embed(ids))
        # Which tokens count is drawn here, and used behind the blocks.
        weight = torch.rand(ids.shape) if self.training else torch.ones(ids.shape)
        for block in self.blocks:
            x = block(x)
            if self.training:
                torch.rand(())
        x = F.dropout(x, 0.1, self.training)
        losses = F.cross_entropy(
            self.head(x).flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return (losses * weight.flatten().to(losses.dtype)).mean()


def model_of(name: str, depth: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    if name == "hand_written":
        return HandWritten(depth).to(dtype)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    kind, _, attention = name.partition("-")
    sizes = {
        "llama": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": depth,
            "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40,
            "attention_dropout": 0.1,
        },
        "gpt2": {
            "n_embd": 16, "n_layer": depth, "n_head": 2, "vocab_size": 40, "n_positions": 16,
            "bos_token_id": 0, "eos_token_id": 0,
        },
        "bert": {
            "vocab_size": 40, "num_hidden_layers": depth, "hidden_size": 16,
            "intermediate_size": 24, "num_attention_heads": 2, "tie_word_embeddings": False,
        },
    }[kind]  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes)
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention or "eager")
    return Loss(model).to(dtype).train()


def on_one_device(
    model: nn.Module, microbatches: int
) -> tuple[list[Tensor], dict[str, Tensor], Tensor, Tensor]:
    """Two steps, one micro-batch after the other; what the loop then draws, and the state."""
    torch.manual_seed(7)
    losses: list[Tensor] = []
    drawn = torch.zeros(0)
    for batch in batches(STEPS, rows=ROWS, length=LENGTH):
        model.zero_grad()
        found: list[Tensor] = []
        for index in range(microbatches):
            loss = model({key: x.chunk(microbatches)[index] for key, x in batch.items()})
            (loss / microbatches).backward()
            found.append(loss.detach())
        losses.append(torch.stack(found).double().mean().to(found[0].dtype))
        drawn = torch.rand(2)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, grads, drawn, torch.get_rng_state()


def compared(build: Any, constraints: Constraints, tied: str = "wte") -> None:
    """Two steps of a plan, compared with one device."""
    plan = make_plan(constraints)
    data = plan.data_parallel.size
    exact = data * plan.tensor_parallel.size == 1
    losses, grads, drawn, state = on_one_device(build(), plan.num_microbatches * data)
    model, _ = vescale.parallelize(plan, build(), lambda m: SGD(m.parameters(), lr=0.1))
    rank = vescale.data_parallel_rank(model)
    torch.manual_seed(7)
    found = torch.zeros(0)
    for batch, expected in zip(batches(STEPS, rows=ROWS, length=LENGTH), losses, strict=True):
        model.zero_grad()
        loss = model({key: x.chunk(data)[rank] for key, x in batch.items()})
        loss.backward()
        found = torch.rand(2)
        if exact:
            assert torch.equal(loss.detach(), expected), (loss, expected)
        # Of parts of tensor-parallel ranks, whose sums are in another order.
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0)
    assert torch.equal(found, drawn), "the loop draws something else"
    assert torch.equal(torch.get_rng_state(), state)
    for fqn, parameter in model.named_parameters():
        if fqn not in grads:
            assert parameter.grad is None, fqn
            continue
        grad = whole(parameter.grad)
        # Sums over ranks, and of a tied weight's stages, are in another order.
        if exact and tied not in fqn:
            assert torch.equal(grad, grads[fqn]), fqn
        torch.testing.assert_close(grad, grads[fqn], rtol=1e-10, atol=1e-12, msg=fqn)


def plan_of(schedule: str, size: int, microbatches: int, **others: Any) -> Constraints:
    virtual = 2 if schedule in ("interleaved_1f1b", "zbv") else 1
    return {PP: size, PARTS: microbatches, SCHEDULE: schedule, VIRTUAL: virtual, **others}


def depth_of(constraints: Constraints) -> int:
    return constraints[PP] * constraints[VIRTUAL]


def check(world: World, name: str, constraints: Constraints) -> None:
    build = partial(model_of, name, depth_of(constraints), torch.float64)
    world.run(compared, build, constraints)


MODELS = ["hand_written", "gpt2-eager", "gpt2-sdpa", "bert-sdpa", "llama-eager"]
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zbv"]
# By day every schedule with one model, and every model with some schedule.
BY_DAY = {*zip(MODELS, SCHEDULES * 2)}  # noqa: B905


@pytest.mark.by_day("hand_written-gpipe", "gpt2-eager-1f1b")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(
            name,
            schedule,
            marks=pytest.mark.slow if (name, schedule) in BY_DAY else pytest.mark.nightly,
        )
        for name in MODELS
        for schedule in SCHEDULES
    ],
)
def test_stages_draw_what_one_device_draws(world2: World, name: str, schedule: str) -> None:
    check(world2, name, plan_of(schedule, 2, 4))


@pytest.mark.by_day("gpt2-sdpa-1f1b")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), [("hand_written", "zbv"), ("gpt2-sdpa", "1f1b")])
def test_four_stages_too(world4: World, name: str, schedule: str) -> None:
    check(world4, name, plan_of(schedule, 4, 4))


def checkpointed() -> nn.Module:
    """GPT-2 whose blocks run again in backward, as the program says."""
    model = model_of("gpt2-sdpa", 2, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers 5 has another name for it
        cast("Any", model).model.gradient_checkpointing_enable()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plan", "program"])
def test_blocks_that_run_again_draw_the_same_again(world2: World, kind: str) -> None:
    if kind == "plan":
        check(world2, "gpt2-eager", plan_of("1f1b", 2, 4, recompute="full"))
    else:
        world2.run(compared, checkpointed, plan_of("1f1b", 2, 4))


@pytest.mark.by_day("hand_written-others1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("hand_written", {DP: 2}),
        ("hand_written", {DP: 2, ZERO: 3, "recompute": "full"}),
        ("gpt2-eager", {TP: 2}),
        ("gpt2-sdpa", {TP: 2, "recompute": "full"}),
    ],
)
def test_beside_other_parallelism(world4: World, name: str, others: Constraints) -> None:
    check(world4, name, {**plan_of("1f1b", 2, 2), **others})


def trained_on(
    model: Any, optimizer: SGD, given: list[dict[str, Tensor]], microbatches: int
) -> list[Tensor]:
    """Steps on one device, one micro-batch after the other."""
    losses: list[Tensor] = []
    for batch in given:
        found: list[Tensor] = []
        for index in range(microbatches):
            loss = model({key: x.chunk(microbatches)[index] for key, x in batch.items()})
            (loss / microbatches).backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(found).double().mean())
    return losses


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def resumed(directory: str, before: Constraints, after: Constraints) -> None:
    """Two steps of a plan, a checkpoint, and two of another plan in another model."""
    given = batches(4, rows=ROWS, length=LENGTH)
    build = partial(model_of, "hand_written", 4, torch.float64)
    plain = build()
    torch.manual_seed(7)
    expected = trained_on(plain, sgd(plain), given, 4)
    state, found = torch.get_rng_state(), list[Tensor]()
    for start, constraints in ((0, before), (2, after)):
        plan = make_plan(constraints)
        model, optimizer = vescale.parallelize(plan, build(), sgd)
        parts = {"model": model, "optimizer": optimizer, "random": RngState()}
        torch.manual_seed(7 - start)  # another process begins with others
        if start:
            vescale.load(directory, parts)
        data, rank = plan.data_parallel.size, vescale.data_parallel_rank(model)
        for batch in given[start : start + 2]:
            loss = model({key: x.chunk(data)[rank] for key, x in batch.items()})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        if not start:
            vescale.save(directory, parts)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.by_day("zbv")
@pytest.mark.slow
@pytest.mark.parametrize("after", ["zbv", "gpipe"])
def test_a_run_that_resumes_draws_on(world2: World, tmp_path: Path, after: str) -> None:
    world2.run(resumed, str(tmp_path / "step"), plan_of("1f1b", 2, 4), plan_of(after, 2, 4))


@pytest.mark.slow
def test_a_run_that_resumes_on_more_ranks_draws_on(world4: World, tmp_path: Path) -> None:
    data = {**plan_of("1f1b", 2, 2), DP: 2, ZERO: 2}
    world4.run(resumed, str(tmp_path / "step"), data, plan_of("1f1b", 4, 4))


class DrawsBack(torch.autograd.Function):
    """Draws in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad + 0 * torch.rand(3).sum()


class Changing(nn.Module):
    """Draws what no run on shapes shows: by a number that a program changes, or in backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.chance = nn.Linear(8, 8), kind, 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), self.chance)
        if self.kind == "backward":
            x = cast("Tensor", DrawsBack.apply(x))
        return x if self.kind == "nothing" else F.dropout(x, 0.1)


def warned_of(kind: str) -> tuple[list[str], bool]:
    """Return warnings of a few steps, and whether generators are alike at the end."""
    torch.manual_seed(0)
    built = nn.Sequential(Changing(kind), Changing(kind), Mean())
    model: Any = vescale.parallelize(make_plan(plan_of("1f1b", 2, 2)), built)
    x = torch.randn(4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x).backward()
            for block in list(model)[:2] if kind != "backward" else ():
                block.chance = 0.5
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, torch.get_rng_state())
    return [str(each.message) for each in caught], torch.equal(states[0], states[1])


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nothing", "some", "backward"])
def test_what_draws_otherwise_than_seen_is_named(world2: World, kind: str) -> None:
    where = {"nothing": "forward", "some": "'{}'", "backward": "between forward passes"}[kind]
    found = world2.run(warned_of, kind)
    for rank, (said, are_alike) in enumerate(found):
        assert are_alike
        # The first stage of two micro-batches has run both before it runs backward.
        assert len(said) == (0 if kind == "backward" and rank == 0 else 1), said
        assert all(text.startswith(where.format(rank)) for text in said)
        assert all("drew more or fewer random numbers" in text for text in said)


class OwnGenerator(nn.Module):
    """Draws from a generator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.randn(x.shape, generator=self.noise)


def refused_of(block: type[nn.Module]) -> str:
    model: Any = vescale.parallelize(
        make_plan(plan_of("1f1b", 2, 2)), nn.Sequential(block(), block(), Mean())
    )
    with pytest.raises(ValueError, match="generator of its own") as caught:
        model(torch.randn(4, 8))
    return str(caught.value)


@pytest.mark.slow
def test_draws_from_a_generator_of_ones_own_are_refused(world2: World) -> None:
    first, second = world2.run(refused_of, OwnGenerator)
    assert first == second
    assert first.startswith("aten.randn.generator in '0' draws from a generator of its own")


class Counting(TorchDispatchMode):
    """Counts the operators of a rank, and settings of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def states_set(training: bool) -> tuple[int, list[str]]:
    """Return how often a step sets the generator's state, and what it dispatches."""
    model: Any = vescale.parallelize(
        make_plan(plan_of("1f1b", 2, 4)), HandWritten(2).train(training)
    )
    batch = batches(1, rows=ROWS, length=LENGTH)[0]
    model(batch).backward()
    generator, count = torch.default_generator, 0

    class Watched:
        def __getattr__(self, name: str) -> Any:
            nonlocal count
            count += name == "set_state"
            return getattr(generator, name)

    torch.default_generator = cast("Any", Watched())
    try:
        with Counting() as mode:
            model(batch)
    finally:
        torch.default_generator = generator
    return count, mode.names


@pytest.mark.slow
def test_a_model_that_draws_nothing_pays_nothing(world2: World) -> None:
    for count, names in world2.run(states_set, False):
        assert count == 0
        assert not [name for name in names if "random" in name or "bernoulli" in name]
    assert all(count for count, _ in world2.run(states_set, True))
