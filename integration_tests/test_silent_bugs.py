"""Programs that were once silently wrong: each equals one device or is refused on every rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import SGD, AdamW, Optimizer

import vescale
from vescale_dtensor import distribute_tensor
from vescale_testing import World

from .models import HandWritten, batches, build
from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .short_group import in_short_group
from .training import whole

PIPELINE: Constraints = {PP: 2, PARTS: 2}
TENSOR: Constraints = {TP: 2}
DATA: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
}
ALL = {**DATA, "pp": PIPELINE}
WIDTH = 8
aten = torch.ops.aten
# A rank that did not see the fault itself names the one that did.
REFUSALS = (ValueError, TypeError, NotImplementedError, vescale.PeerError)


@dataclass
class Run:
    """A training run on one device (no constraints) or as one rank under a plan.

    Attributes:
        constraints: Of the plan.
        results: What came out so far, in order.
    """

    constraints: Constraints | None
    results: list[Tensor] = field(default_factory=list[Tensor])

    def start(
        self, model: nn.Module, optimizer_fn: Callable[[nn.Module], Optimizer] | None = None
    ) -> tuple[Any, Optimizer]:
        model, optimizer_fn = model.double(), optimizer_fn or sgd
        if self.constraints is None:
            return model, optimizer_fn(model)
        return vescale.parallelize(make_plan(self.constraints), model, optimizer_fn)

    def part(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of a global batch."""
        replicas = (self.constraints or {}).get(DP, 1)
        rank = int(os.environ["RANK"]) if replicas > 1 else 0
        return {name: tensor.chunk(replicas)[rank] for name, tensor in batch.items()}

    def keep(self, value: Tensor) -> None:
        self.results.append(whole(value).to(torch.float64).clone())

    def train(
        self,
        model: nn.Module,
        optimizer_fn: Callable[[nn.Module], Optimizer] | None = None,
        given: list[dict[str, Tensor]] | None = None,
    ) -> None:
        """Take three ordinary steps."""
        model, optimizer = self.start(model, optimizer_fn)
        for batch in given or rows():
            loss = model(self.part(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.keep(loss)
        self.finish(model)

    def finish(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self.keep(parameter)


Program = Callable[[Run], None]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def rows(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            name: torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
            for name in ("x", "y")
        }
        for _ in range(count)
    ]


def both(program: Program, constraints: Constraints) -> tuple[list[Tensor], list[Tensor]]:
    """Run a program under a plan and, on the same rank, as on one device."""
    answers: list[list[Tensor]] = []
    with warnings.catch_warnings():
        # What is right in spite of a warning passes, what is wrong in spite of one does not.
        warnings.simplefilter("ignore")
        for each in (constraints, None):
            torch.manual_seed(0)
            run = Run(each)
            program(run)
            answers.append(run.results)
    return answers[0], answers[1]


def attempt(
    program: Program, constraints: Constraints
) -> tuple[list[Tensor], list[Tensor]] | type[Exception]:
    try:
        return both(program, constraints)
    except REFUSALS as error:
        return type(error)


def assert_right(answers: tuple[list[Tensor], list[Tensor]]) -> None:
    found, expected = answers
    assert expected
    # Rounding of float64 over a few steps on values of order 1.
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def right(world: World, program: Program, constraints: Constraints) -> None:
    for answers in world.run(both, program, constraints):
        assert_right(answers)


def right_or_refused(world: World, program: Program, constraints: Constraints) -> None:
    with TemporaryDirectory() as directory:
        answers = world.run(in_short_group, directory, attempt, program, constraints)
        world.close()
    if any(isinstance(answer, type) and answer is not vescale.PeerError for answer in answers):
        assert all(isinstance(answer, type) for answer in answers), answers
        return
    for answer in answers:
        assert not isinstance(answer, type), answers
        assert_right(answer)


# What a pipeline's stages do with code between and around the blocks


class Between(nn.Module):
    """Four linear blocks and something between them."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = self.between(x, block(x))
        return F.mse_loss(x, batch["y"])


class LongSkip(nn.Module):
    """The input of the first block is used again after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        first = x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x + first), batch["y"])


class Activated(nn.Module):
    """An ``nn.Sequential`` with an activation between its two linears."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), activation, nn.Linear(2 * WIDTH, WIDTH)
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(self.out(self.net(batch["x"])), batch["y"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Plain(nn.Module):
    """What every plan can run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(self.logits(batch), batch["y"])


class Penalty(Plain):
    """Decays its parameters in its own forward, before or after the blocks."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first

    def penalty(self) -> Tensor:
        return 0.01 * torch.stack([p.square().sum() for p in self.blocks.parameters()]).sum()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        if self.first:
            return self.penalty() + super().forward(batch)
        return super().forward(batch) + self.penalty()


def residual_outside(run: Run) -> None:
    run.train(Between(lambda x, y: x + y.tanh()))


def relu_outside(run: Run) -> None:
    run.train(Between(lambda _, y: y.relu()))


def long_skip(run: Run) -> None:
    run.train(LongSkip())


def sequential(run: Run) -> None:
    run.train(Activated(nn.GELU()))


def penalty_first(run: Run) -> None:
    run.train(Penalty(first=True))


def penalty_last(run: Run) -> None:
    run.train(Penalty(first=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [residual_outside, relu_outside, long_skip, sequential, penalty_first, penalty_last],
)
def test_a_pipeline_drops_nothing_that_lies_outside_the_blocks(
    world2: World, program: Program
) -> None:
    right_or_refused(world2, program, PIPELINE)


def frozen_below(run: Run) -> None:
    model = HandWritten()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.2.mlp" in name)
    run.train(model, given=batches(3))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ALL)
def test_all_but_a_few_parameters_may_be_frozen(world2: World, plan: str) -> None:
    right(world2, frozen_below, ALL[plan])


# What tensor parallelism certifies


class Gate(nn.Module):
    """Between its linears it uses something that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * x.mean(-1, keepdim=True))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.gate = Gate()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.gate(self.embed(batch["x"]).unsqueeze(1)).squeeze(1)
        return F.mse_loss(self.out(x), batch["y"])


def learned_activation(run: Run) -> None:
    run.train(Activated(nn.PReLU()))


def gated(run: Run) -> None:
    run.train(Gated())


@pytest.mark.slow
@pytest.mark.parametrize("program", [learned_activation, gated])
def test_what_is_certified_has_the_gradients_of_one_device(
    world2: World, program: Program
) -> None:
    right(world2, program, TENSOR)


def hand_written(run: Run) -> None:
    run.train(HandWritten(), given=batches(3))


def gpt2(run: Run) -> None:
    run.train(build("gpt2"), given=batches(3))


WRONG_PLANS: dict[str, tuple[Program, dict[str, str]]] = {
    "qkv_not_interleaved": (
        hand_written,
        {
            "blocks.*.attention.qkv.weight": "Shard(0)",
            "blocks.*.attention.proj.weight": "Shard(1)",
            "blocks.*.attention.<attr:heads>": "Shard(0)",
        },
    ),
    "one_block_forgotten": (
        hand_written,
        {
            "blocks.*.attention.qkv.weight": "InterleavedShard(0, 3)",
            "blocks.*.attention.proj.weight": "Shard(1)",
            "blocks.0.attention.<attr:heads>": "Shard(0)",
        },
    ),
    "uneven_gather": (
        hand_written,
        {"head.weight": "Shard(0)", "head.<out>": "Replicate()"},
    ),
    "head_without_gather": (gpt2, {"model.lm_head.weight": "Shard(0)"}),
    "tied_head": (
        gpt2,
        {"model.lm_head.weight": "Shard(0)", "model.lm_head.<out>": "Replicate()"},
    ),
    "output_of_whole": (hand_written, {"norm.<out>": "Replicate()"}),
    "output_not_replicated": (hand_written, {"head.<out>": "Shard(1)"}),
    "grad_replicated": (hand_written, {"norm.weight.<grad>": "Replicate()"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_PLANS)
def test_a_wrong_sharding_plan_is_refused(world2: World, name: str) -> None:
    program, plan = WRONG_PLANS[name]
    right_or_refused(world2, program, {**TENSOR, "tensor_parallel.sharding_plan": plan})


# What an ordinary loop may do


def two_losses(run: Run) -> None:
    """Adds the losses of two calls before it differentiates them."""
    model, optimizer = run.start(Plain())
    given = rows(4)
    for first, second in zip(given[::2], given[1::2], strict=True):
        loss = model(run.part(first)) + model(run.part(second))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def evaluation_between(run: Run) -> None:
    """Evaluates between forward and backward."""
    model, optimizer = run.start(Plain())
    for batch in rows():
        loss = model(run.part(batch))
        with torch.no_grad():
            run.keep(model.eval()(run.part(batch)))
        model.train()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def backward_twice(run: Run) -> None:
    model, optimizer = run.start(Plain())
    for batch in rows():
        loss = model(run.part(batch))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def group_later(run: Run) -> None:
    def of_blocks(model: nn.Module) -> Optimizer:
        return AdamW(model.get_submodule("blocks").parameters(), lr=0.01)

    model, optimizer = run.start(Plain(), of_blocks)
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.1})
    for batch in rows():
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()
    run.finish(model)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Iterator[bool]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.steps = steps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if next(ctx.steps):
            raise LookupError("this step fails")
        return grad, None


def failed_backward(run: Run) -> None:
    """Goes on after a backward that raised on every rank."""
    model, steps = Plain(), iter([False, True, False, False])
    model.embed.register_forward_hook(lambda _, __, output: _Failing.apply(output, steps))
    model, optimizer = run.start(model)
    for batch in rows(4):
        loss = model(run.part(batch))
        try:
            loss.backward()
        except LookupError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ALL)
@pytest.mark.parametrize("program", [two_losses, evaluation_between, group_later])
def test_a_loop_that_torch_allows_is_right_or_refused(
    world2: World, program: Program, plan: str
) -> None:
    right_or_refused(world2, program, ALL[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
@pytest.mark.parametrize("program", [backward_twice, failed_backward, penalty_first, penalty_last])
def test_a_loop_without_a_pipeline_is_right_or_refused(
    world2: World, program: Program, plan: str
) -> None:
    right_or_refused(world2, program, DATA[plan])


class SkipsBlocks(Plain):
    """Leaves out a block, another one on each rank."""

    skipped = 0

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for index, block in enumerate(self.blocks):
            if index != self.skipped_for(batch):
                x = block(x)
        return self.head(x)

    def skipped_for(self, batch: Mapping[str, Tensor]) -> int:
        return self.skipped


class SkipsByFirstRow(SkipsBlocks):
    """Leaves out a block that the first row of the batch decides on: rows meet."""

    def skipped_for(self, batch: Mapping[str, Tensor]) -> int:
        return int(batch["x"][0, 0] > 0)


def skipped_by_first_row(run: Run) -> None:
    model, optimizer = run.start(SkipsByFirstRow())
    for batch in rows(4):
        model(run.part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


def skipped_blocks(run: Run) -> None:
    model, optimizer = run.start(SkipsBlocks())
    for batch in rows(4):
        if run.constraints is None:
            losses: list[Tensor] = []
            for model.skipped in range(2):
                half = {k: v.chunk(2)[model.skipped] for k, v in batch.items()}
                losses.append(model(half))
            loss = torch.stack(losses).mean()
        else:
            model.skipped = dist.get_rank()
            loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish(model)


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
def test_a_choice_by_the_first_row_is_that_of_the_whole_batch(world2: World, plan: str) -> None:
    right_or_refused(world2, skipped_by_first_row, DATA[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
def test_blocks_left_out_on_some_ranks_do_not_mix_up_parameters(world2: World, plan: str) -> None:
    right_or_refused(world2, skipped_blocks, DATA[plan])


# What operators on distributed tensors write


def written(name: str) -> tuple[Tensor, Tensor]:
    """Run an operator on a plain tensor and a distributed one; return what it should give too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inputs may be gathered
        return _written(name)


def _written(name: str) -> tuple[Tensor, Tensor]:
    mesh, full = init_device_mesh("cpu", (2,)), torch.arange(24.0).view(4, 6)
    cut, plain = distribute_tensor(full, mesh, [Shard(0)]), torch.ones(4, 6)
    one = torch.ones(4, 6)
    match name:
        case "add_":
            return plain.add_(cut), one + full
        case "lerp_":
            return plain.lerp_(cut, 0.5), one.lerp(full, 0.5)
        case "out":
            torch.add(cut, cut, out=plain)
            return plain, full * 2
        case "foreach_copy":
            aten._foreach_copy_([plain], [cut])
            return plain, full
        case "foreach_lerp":
            aten._foreach_lerp_([plain], [cut], 0.5)
            return plain, one.lerp(full, 0.5)
        case "foreach_max":
            return whole(aten._foreach_max([cut])[0]), full.max()
        case "foreach_norm":
            (norm,) = aten._foreach_norm([cut], 2.0, dtype=torch.float64)
            return whole(norm), full.double().norm()
        case "keepdim":
            return (
                whole(torch.linalg.vector_norm(cut, keepdim=True)),
                torch.linalg.vector_norm(full, keepdim=True),
            )
        case _:
            raise ValueError(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "add_", "lerp_", "out", "foreach_copy", "foreach_lerp", "foreach_max", "foreach_norm",
        "keepdim",
    ],
)  # fmt: skip
def test_an_operator_writes_the_whole_tensor(world2: World, name: str) -> None:
    for found, expected in world2.run(written, name):
        # One rounding of float32 in a norm; everything else is exact.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
