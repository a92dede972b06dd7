"""Buffers under a pipeline: after a step every rank has those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import ParallelPlan, with_constraints
from vescale_parallel._mesh.mesh import axis_group, build_mesh
from vescale_parallel._pipeline.buffers import StageBuffers

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
PLAN = with_constraints(ParallelPlan(), {"pipeline_parallel.size": 2})


class Counting(nn.Module):
    """Counts its calls; ``runs`` says on which ranks the counting module runs."""

    def __init__(self, by_batch: bool = False) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.ones(2))
        self.by_batch, self.runs = by_batch, True

    def forward(self, x: Tensor) -> Tensor:
        steps = self.get_buffer("steps")
        if self.runs:
            steps.add_(int(x.sum()) if self.by_batch else 1)
        return x * steps


def stepped(
    model: Counting, rank: int, *, counting_rank: int | None = None, steps: int = 2
) -> tuple[int, list[float]]:
    """Run some steps of three micro-batches; return the counter and what was computed."""
    group = axis_group(build_mesh(PLAN), "pp")
    assert group is not None
    model.runs = counting_rank is None or rank == counting_rank
    buffers, found = StageBuffers(model, group), list[float]()
    for _ in range(steps):
        with buffers.call(model) as forward:
            for microbatch in range(3):
                found.append(float(forward(torch.tensor(1.0 + microbatch))))
    return int(model.get_buffer("steps")), found


def test_a_step_of_several_runs_counts_once(in_threads: InThreads) -> None:
    models = [Counting(), Counting()]
    results = in_threads(2, lambda rank: stepped(models[rank], rank))
    assert results == [(2, [1, 2, 3, 2, 4, 6])] * 2


@pytest.mark.parametrize("counting_rank", [0, 1])
def test_a_rank_that_did_not_run_the_module_gets_its_buffer(
    in_threads: InThreads, counting_rank: int
) -> None:
    models = [Counting(), Counting()]
    results = in_threads(
        2, lambda rank: stepped(models[rank], rank, counting_rank=counting_rank, steps=3)
    )
    assert [steps for steps, _ in results] == [3, 3]


def test_a_buffer_that_depends_on_the_microbatch_is_refused_on_all_ranks(
    in_threads: InThreads,
) -> None:
    models = [Counting(by_batch=True), Counting(by_batch=True)]

    def step(rank: int) -> None:
        with pytest.raises(ValueError, match="the buffer 'steps' is changed by forward in a way"):
            stepped(models[rank], rank, counting_rank=1)

    in_threads(2, step)
