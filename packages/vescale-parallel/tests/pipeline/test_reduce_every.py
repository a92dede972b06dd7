"""Gradients of a pipeline that are reduced behind every micro-batch: bits, messages and memory."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from vescale_dtensor import CommCounter, DTensor
from vescale_parallel import ParallelPlan, parallelize, with_constraints
from vescale_parallel._data_parallel.param_group import ParamGroup
from vescale_parallel._pipeline.execution import watching
from vescale_testing import World

Constraints = dict[str, Any]
PP, PARTS = "pipeline_parallel.size", "pipeline_parallel.microbatches"
SCHEDULE, VIRTUAL = "pipeline_parallel.schedule", "pipeline_parallel.virtual_stages"
DP, ZERO = "data_parallel.size", "data_parallel.zero_stage"
EVERY = "pipeline_parallel.reduce_every"
WIDTH, ROWS = 8, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)) for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x), y)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(ROWS, WIDTH, generator=generator),
            torch.randn(ROWS, WIDTH, generator=generator),
        )
        for _ in range(count)
    ]


def started() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def optimizer_of(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def on_one_device(microbatches: int, ranks: int, *, once: tuple[str, ...] = ()) -> list[Tensor]:
    """Train on means over ranks of each micro-batch, summed in order.

    Of parameters whose names begin with ``once`` it is the mean of ranks' sums.
    """
    model = started()
    optimizer, parameters = optimizer_of(model), list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    for x, y in batches(3):
        grads: list[list[list[Tensor]]] = []  # by rank and micro-batch
        for part_x, part_y in zip(x.chunk(ranks), y.chunk(ranks), strict=True):
            grads.append([])
            pairs = zip(part_x.chunk(microbatches), part_y.chunk(microbatches), strict=True)
            for each_x, each_y in pairs:
                loss = model(each_x, each_y) / microbatches
                grads[-1].append(list(torch.autograd.grad(loss, parameters)))
        for index, parameter in enumerate(parameters):
            of_rank = [[each[index] for each in of_parts] for of_parts in grads]
            if not names[index].startswith(once):
                means = [sum_of(list(part)) / ranks for part in zip(*of_rank, strict=True)]
                parameter.grad = sum_of(means)
            else:
                parameter.grad = sum_of([sum_of(parts) for parts in of_rank]) / ranks
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def sum_of(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for each in tensors[1:]:
        total = total + each
    return total


def gathered(every: str) -> tuple[dict[int, int], int, int]:
    """Return gathers by group, the most elements gathered at a time, and how many there are."""
    plan = {PP: 2, PARTS: 4, DP: 2, ZERO: 3, EVERY: every, "data_parallel.prefetch": 1}
    model, _ = parallelize(with_constraints(ParallelPlan(), plan), started(), optimizer_of)
    rank, peak, gathers = torch.distributed.get_rank() % 2, [0], Counter[int]()
    held = [p.unsharded for p in engine_of(model).parameters.params if p.unsharded is not None]
    ((x, y),) = batches(1)
    plain = ParamGroup.gather

    def live() -> None:
        whole = [p.numel() for p in held if p.untyped_storage().size()]
        peak[0] = max(peak[0], sum(whole))

    def gather(self: ParamGroup) -> None:
        plain(self)
        gathers[self.number] += 1
        live()

    for _ in range(2):
        gathers.clear()
        peak[0] = 0
        ParamGroup.gather = gather
        try:
            model(x.chunk(2)[rank], y.chunk(2)[rank]).backward()
        finally:
            ParamGroup.gather = plain
        model.zero_grad()
    return dict(gathers), peak[0], sum(p.numel() for p in held)


@pytest.mark.slow
def test_parameters_are_gathered_for_every_pass_and_freed_behind_it(world4: World) -> None:
    """Two blocks on one stage, three on the other; each pass has one and the one ahead of it."""
    block = 2 * WIDTH * 24 + 24 + WIDTH
    for rank, (gathers, peak, numel) in enumerate(world4.run(gathered, "microbatch")):
        blocks = {number: count for number, count in gathers.items() if number}
        assert len(blocks) == (2 if rank < 2 else 3)
        # Forward and backward of four micro-batches, but for what backward begins with.
        assert all(4 <= count <= 8 for count in blocks.values()), gathers
        assert sum(blocks.values()) >= 8 * len(blocks) - 4
        # Parameters outside of blocks stay.
        assert peak <= 2 * block + WIDTH * WIDTH + WIDTH
        assert peak < numel or rank < 2


def trained(constraints: Constraints) -> list[Tensor]:
    model, optimizer = parallelize(
        with_constraints(ParallelPlan(), constraints), started(), optimizer_of
    )
    size = constraints[DP]
    rank = torch.distributed.get_rank() % size
    for x, y in batches(3):
        with warnings.catch_warnings():
            # Of schedules with gradients in two parts, that this plan computes them together.
            warnings.filterwarnings(
                "ignore", ".*computes gradients of inputs and of weights apart"
            )
            loss = model(x.chunk(size)[rank], y.chunk(size)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter) for parameter in model.parameters()]


def whole(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    assert isinstance(values, DTensor)
    return values.full_tensor()


CASES: dict[str, Constraints] = {
    "1f1b": {PP: 2, PARTS: 4},
    "gpipe": {PP: 2, PARTS: 4, SCHEDULE: "gpipe"},
    "interleaved": {PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2},
    "zero bubble": {PP: 2, PARTS: 4, SCHEDULE: "zbv", VIRTUAL: 2},
}


@pytest.mark.by_day("1f1b-2")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        "interleaved",
        pytest.param("gpipe", marks=pytest.mark.nightly),
        pytest.param("zero bubble", marks=pytest.mark.nightly),
    ],
)
def test_bits_of_one_device_that_adds_the_means_of_micro_batches(
    world4: World, name: str, zero: int
) -> None:
    plan = {**CASES[name], DP: 2, ZERO: zero, EVERY: "microbatch"}
    # Where one rank has both ends of a V, what is outside of blocks is reduced once a step.
    once = ("embed", "head") if name == "zero bubble" else ()
    expected = on_one_device(4, 2, once=once)
    for found in world4.run(trained, plan):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    # The oracle tells the two orders apart.
    other = on_one_device(4, 2, once=("embed", "head", "blocks"))
    assert not all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


def engine_of(model: Any) -> Any:
    return model._vescale_engine


def counted(every: str, zero: int) -> tuple[int, int, int, list[int]]:
    """Return reductions, bytes, the most elements of whole gradients, and those in between."""
    plan = {PP: 2, PARTS: 4, DP: 2, ZERO: zero, EVERY: every}
    model, optimizer = parallelize(with_constraints(ParallelPlan(), plan), started(), optimizer_of)
    rank, peak, waiting = torch.distributed.get_rank() % 2, [0], list[int]()
    held = [p.unsharded for p in engine_of(model).parameters.params if p.unsharded is not None]
    plain = ParamGroup.reduce_over_data
    ((x, y),) = batches(1)
    reduced: list[int] = []

    def live() -> int:
        return sum(p.grad.numel() for p in held if p.grad is not None)

    def seen(_: Tensor) -> None:
        peak[0] = max(peak[0], live())

    def noted(self: ParamGroup, grads: Any) -> None:
        reduced.append(self.number)
        plain(self, grads)

    for parameter in held:
        parameter.register_post_accumulate_grad_hook(seen)
    ParamGroup.reduce_over_data = noted
    counter = CommCounter()
    try:
        for _ in range(2):
            counter = CommCounter()
            reduced.clear()
            peak[0] = 0
            waiting.clear()
            with counter, watching(lambda *_: waiting.append(live())):
                loss = model(x.chunk(2)[rank], y.chunk(2)[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        ParamGroup.reduce_over_data = plain
    nbytes = sum(event.nbytes for event in counter.events)
    return len(reduced), nbytes, peak[0], waiting


@pytest.mark.by_day("2")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_whole_gradients_live_for_two_blocks_and_cost_a_reduction_each(
    world4: World, zero: int
) -> None:
    block = 2 * WIDTH * 24 + 24 + WIDTH
    step, microbatch = (world4.run(counted, every, zero) for every in ("step", "microbatch"))
    for once, often in zip(step, microbatch, strict=True):
        assert often[0] == 4 * once[0]
        assert often[1] > 2 * once[1] if zero == 2 else often[1] > once[1]
        assert once[2] >= 2 * block
        assert often[2] <= 2 * block + WIDTH * WIDTH + WIDTH
        # What is outside of blocks is taken at the end of a pass.
        assert max(once[3]) >= 2 * block
        assert often[3][-1] == 0


def unsynced(every: str) -> list[Tensor]:
    """Two passes, the first of them under ``no_sync``, and one step."""
    plan = {PP: 2, PARTS: 2, DP: 2, ZERO: 2, EVERY: every}
    model, optimizer = parallelize(with_constraints(ParallelPlan(), plan), started(), optimizer_of)
    rank = torch.distributed.get_rank() % 2
    first, second = batches(2)
    with model.no_sync():
        model(*(x.chunk(2)[rank] for x in first)).backward()
    model(*(x.chunk(2)[rank] for x in second)).backward()
    optimizer.step()
    return [whole(parameter) for parameter in model.parameters()]


@pytest.mark.nightly
def test_passes_under_no_sync_are_summed_before_they_are_reduced(world4: World) -> None:
    once, often = (world4.run(unsynced, every) for every in ("step", "microbatch"))
    for one, other in zip(once[0], often[0], strict=True):
        assert torch.equal(one, other)
