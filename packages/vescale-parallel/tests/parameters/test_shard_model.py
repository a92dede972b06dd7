"""Whose memory the parameters of a parallelized model have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vescale_parallel import ParallelPlan, parallelize, with_constraints

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]


def _is_kept(in_threads: InThreads, constraints: dict[str, Any], make: Callable[[], Any]) -> bool:
    plan = with_constraints(ParallelPlan(), constraints)
    models = [make() for _ in range(plan.world_size)]

    def of_rank(rank: int) -> bool:
        places = [parameter.data_ptr() for parameter in models[rank].parameters()]
        values = [parameter.detach().clone() for parameter in models[rank].parameters()]
        model = parallelize(plan, models[rank])
        for parameter, value in zip(model.parameters(), values, strict=True):
            assert torch.equal(parameter.full_tensor(), value)
        return places == [p.to_local().data_ptr() for p in model.parameters()]

    [is_kept] = {*in_threads(plan.world_size, of_rank)}
    return is_kept


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def _of_one_tensor() -> nn.Module:
    model, flat = _linear(), torch.arange(20.0)
    model.weight = nn.Parameter(flat[:16].view(4, 4))
    model.bias = nn.Parameter(flat[16:])
    return model


@pytest.mark.parametrize(
    ("stage", "make", "expected"),
    [
        (0, _linear, True),
        (1, _linear, False),
        # As torch.multiprocessing.spawn passes it: all ranks would write to the same memory.
        (0, lambda: _linear().share_memory(), False),
        (0, _of_one_tensor, False),
    ],
    ids=["copies", "shards", "shared by processes", "views of one tensor"],
)
def test_a_rank_that_keeps_the_whole_keeps_its_memory_if_it_is_its_own(
    in_threads: InThreads, stage: int, make: Callable[[], nn.Module], expected: bool
) -> None:
    constraints = {"data_parallel.size": 2, "data_parallel.zero_stage": stage}
    assert _is_kept(in_threads, constraints, make) is expected
