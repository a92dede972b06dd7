"""What an ordinary training loop may do: each program equals one device or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from vescale_testing import World

from .programs import (
    ALL,
    DATA,
    Plain,
    Program,
    Run,
    penalty_first,
    penalty_last,
    right_or_refused,
    rows,
)


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


@pytest.mark.by_day("two_losses-dp", "group_later-zero3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plan"), [*product([two_losses, evaluation_between, group_later], ALL)]
)
def test_a_loop_that_torch_allows_is_right_or_refused(
    world2: World, program: Program, plan: str
) -> None:
    right_or_refused(world2, program, ALL[plan])


@pytest.mark.by_day("backward_twice-dp", "failed_backward-zero2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plan"),
    [*product([backward_twice, failed_backward, penalty_first, penalty_last], DATA)],
)
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
    """Leaves out a block that the first row of the batch decides on: rows are coupled."""

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


@pytest.mark.by_day("zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
def test_a_choice_by_the_first_row_is_that_of_the_whole_batch(world2: World, plan: str) -> None:
    right_or_refused(world2, skipped_by_first_row, DATA[plan])


@pytest.mark.by_day("zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
def test_blocks_left_out_on_some_ranks_do_not_mix_up_parameters(world2: World, plan: str) -> None:
    right_or_refused(world2, skipped_blocks, DATA[plan])
