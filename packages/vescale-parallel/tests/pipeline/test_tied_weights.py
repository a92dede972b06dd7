"""Weights that two stages use: lent before a step, their gradients returned after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from vescale_dtensor import DTensor
from vescale_parallel import ParallelPlan, with_constraints
from vescale_parallel._mesh.mesh import axis_group, build_mesh
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._pipeline.tied_weights import (
    pipeline_ranks,
    return_tied_gradients,
    send_tied_weights,
)

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
SIZE = 3
PLAN = with_constraints(ParallelPlan(), {"pipeline_parallel.size": SIZE})


def param_of(rank: int, stages: tuple[int, ...], *, trains: bool = True) -> ShardedParameter:
    """Return a parameter of two numbers; each rank that uses it has its own ones."""
    mesh = build_mesh(PLAN)
    values = torch.full((2,), float(rank))
    sharded = nn.Parameter(DTensor.from_local(values, mesh, (Replicate(),)), requires_grad=trains)
    is_here = rank in {stage % SIZE for stage in stages}
    unsharded = nn.Parameter(values.clone(), requires_grad=trains) if is_here else None
    return ShardedParameter(("w",), (), sharded, unsharded, False, None, False, stages)


def group_of(param: ShardedParameter) -> dist.ProcessGroup:
    group = axis_group(param.distributed.device_mesh, "pp")
    assert group is not None
    return group


def lent(
    stages: tuple[int, ...], grads: dict[int, float], *, trains: bool = True
) -> Callable[[int], tuple[Tensor | None, Tensor | None]]:
    def step(rank: int) -> tuple[Tensor | None, Tensor | None]:
        param = param_of(rank, stages, trains=trains)
        group = group_of(param)
        send_tied_weights([param], group)
        unsharded = param.unsharded
        if unsharded is not None and rank in grads:
            unsharded.grad = torch.full((2,), grads[rank])
        return_tied_gradients([param], group)
        if unsharded is None:
            return None, None
        return unsharded.detach(), unsharded.grad

    return step


def listed(found: list[tuple[Tensor | None, Tensor | None]]) -> list[Any]:
    return [[None if each is None else each.tolist() for each in pair] for pair in found]


def test_ranks_that_use_a_parameter_are_each_named_once_the_owner_first(
    in_threads: InThreads,
) -> None:
    def ranks(rank: int) -> list[list[int]]:
        used = [(0,), (0, 5), (2, 3), (1, 4)]
        return [pipeline_ranks(param_of(rank, stages), SIZE) for stages in used]

    assert in_threads(SIZE, ranks) == [[[0], [0, 2], [2, 0], [1]]] * SIZE


def test_borrowers_compute_with_the_owners_values(in_threads: InThreads) -> None:
    found = listed(in_threads(SIZE, lent((0, 2), {})))
    assert found == [[[0, 0], None], [None, None], [[0, 0], None]]


def test_the_owner_is_the_first_stage_whatever_its_rank(in_threads: InThreads) -> None:
    found = listed(in_threads(SIZE, lent((2, 3), {2: 1.0, 0: 2.0})))
    assert found == [[[2, 2], None], [None, None], [[2, 2], [3, 3]]]


def test_gradients_of_all_borrowers_are_added_to_the_owners(in_threads: InThreads) -> None:
    found = listed(in_threads(SIZE, lent((0, 1, 2), {0: 1.0, 1: 2.0, 2: 4.0})))
    assert [grad for _, grad in found] == [[7, 7], None, None]


def test_a_borrowers_gradient_alone_is_the_owners(in_threads: InThreads) -> None:
    found = listed(in_threads(SIZE, lent((0, 2), {2: 4.0})))
    assert [grad for _, grad in found] == [[4, 4], None, None]


def test_no_gradient_anywhere_stays_none(in_threads: InThreads) -> None:
    assert [grad for _, grad in listed(in_threads(SIZE, lent((0, 2), {})))] == [None] * 3


def test_a_frozen_weight_is_lent_and_nothing_comes_back(in_threads: InThreads) -> None:
    found = listed(in_threads(SIZE, lent((1, 2), {}, trains=False)))
    assert found == [[None, None], [[1, 1], None], [[1, 1], None]]
