"""Gradients of a pipeline are reduced once, each stage's when its last backward pass has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import ParallelPlan, parallelize, with_constraints
from vescale_parallel._data_parallel.param_group import ParamGroup
from vescale_parallel._pipeline.execution import watching
from vescale_parallel._pipeline.schedules.messages import Compute, Operation, Reduce
from vescale_testing import World


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def order_of(zero: int) -> tuple[list[str], list[int]]:
    """Return what a step did, with reductions by group, and the groups of these."""
    plan = with_constraints(
        ParallelPlan(),
        {
            "pipeline_parallel.size": 2,
            "pipeline_parallel.microbatches": 2,
            "pipeline_parallel.schedule": "interleaved_1f1b",
            "pipeline_parallel.virtual_stages": 2,
            "data_parallel.size": 2,
            "data_parallel.zero_stage": zero,
        },
    )
    torch.manual_seed(0)
    model = parallelize(plan, Model())
    done: list[str] = []
    reduced: list[int] = []
    plain = ParamGroup.reduce_over_data

    def noted(self: ParamGroup, grads: Any) -> None:
        reduced.append(self.number)
        done.append(f"group {self.number}")
        plain(self, grads)

    def watch(operation: Operation, *_: Any) -> None:
        if isinstance(operation, Compute):
            done.append(str(operation.action))
        elif isinstance(operation, Reduce):
            done.append(f"reduce {operation.stage}")

    ParamGroup.reduce_over_data = noted
    try:
        with watching(watch):
            loss = model(torch.ones(4, 4))
        loss.backward()
    finally:
        ParamGroup.reduce_over_data = plain
    return done, reduced


@pytest.mark.by_day("3")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_stage_is_reduced_when_its_last_backward_has_run(world4: World, zero: int) -> None:
    for rank, (done, reduced) in enumerate(world4.run(order_of, zero)):
        later, sooner = (2, 0) if rank < 2 else (3, 1)
        assert len(reduced) == len(set(reduced)), "every group once"
        for stage in (later, sooner):
            last = max(i for i, each in enumerate(done) if each.startswith(f"{stage}B"))
            assert done[last + 1].startswith("group"), done
            assert f"reduce {stage}" in done[last + 2 : last + 4]
        # While the other virtual stage has backward passes left.
        assert done.index(f"reduce {later}") < done.index(f"{sooner}B1")
