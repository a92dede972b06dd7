"""The mesh of a plan, and what ranks find out about each other on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel import ParallelPlan, with_constraints
from vescale_parallel._mesh.agreement import check_agreement
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._mesh.mesh import (
    axis_group,
    axis_rank,
    axis_size,
    build_mesh,
    data_groups,
    data_rank,
    second_group,
)

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]


def plan_of(**constraints: Any) -> ParallelPlan:
    return with_constraints(
        ParallelPlan(), {name.replace("__", "."): value for name, value in constraints.items()}
    )


def test_a_mesh_has_the_axes_of_more_than_one_rank_outermost_first(in_threads: InThreads) -> None:
    plan = plan_of(pipeline_parallel__size=2, data_parallel__size=2, data_parallel__zero_stage=1)

    def described(rank: int) -> Any:
        mesh = build_mesh(plan)
        axes = ("pp", "dp_replicate", "dp_shard", "tp")
        sizes = [axis_size(mesh, axis) for axis in axes]
        ranks = [axis_rank(mesh, axis) for axis in axes]
        return mesh.mesh_dim_names, sizes, ranks, [axis_group(mesh, a) is None for a in axes]

    for rank, found in enumerate(in_threads(4, described)):
        assert found == (
            ("pp", "dp_shard"),
            [2, 1, 2, 1],
            [rank // 2, 0, rank % 2, 0],
            [False, True, False, True],
        )


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_ranks_that_share_experts_are_next_to_each_other(in_threads: InThreads, zero: int) -> None:
    """But under ZeRO 3, where those that gather parameters are."""
    plan = plan_of(
        data_parallel__size=4,
        data_parallel__zero_stage=zero,
        expert_parallel__size=2,
        tensor_parallel__size=2,
    )

    def described(rank: int) -> Any:
        mesh = build_mesh(plan)
        group = axis_group(mesh, "ep")
        assert group is not None
        return dist.get_process_group_ranks(group), data_rank(mesh), mesh.mesh_dim_names

    for rank, (ranks, part, names) in enumerate(in_threads(8, described)):
        step = 4 if zero == 3 else 2
        first = rank - (rank // step % 2) * step
        assert ranks == [first, first + step]
        assert part == rank // 2
        assert names == (("ep", "tp", "dp_shard") if zero else ("dp_replicate", "ep", "tp"))


def test_one_rank_has_a_mesh_of_one(in_threads: InThreads) -> None:
    def described(rank: int) -> Any:
        mesh = build_mesh(ParallelPlan())
        ranks = DataRanks(mesh)
        return mesh.mesh_dim_names, ranks.size, ranks.rank, len(data_groups(mesh))

    assert in_threads(1, described) == [(("dp_shard",), 1, 0, 0)]


def test_data_ranks_sum_in_the_order_of_ranks(in_threads: InThreads) -> None:
    plan = plan_of(
        data_parallel__size=4, data_parallel__zero_stage=1, data_parallel__replicate_size=2
    )
    # Of float32 values so unequal, every order has another sum.
    values = [1.0, 2.0**25, -(2.0**25), 1.0]

    def total(rank: int) -> tuple[int, float, float]:
        ranks = DataRanks(build_mesh(plan))
        assert ranks.size == 4
        value = torch.tensor(values[rank])
        return ranks.rank, float(ranks.total(value)), float(ranks.mean(value))

    one = torch.tensor(values)
    expected = float((one[0] + one[1]) + (one[2] + one[3]))
    assert in_threads(4, total) == [(rank, expected, expected / 4) for rank in range(4)]


def test_ranks_that_were_given_different_things_all_say_which(in_threads: InThreads) -> None:
    def check(rank: int) -> str:
        held = {"a": "1", "b": "2"}
        check_agreement(plan={"size": "2"}, model=held)
        if rank == 2:
            held = {"a": "1", "b": "3", "c": "4"}
        with pytest.raises(ValueError, match="expected the same model on every rank") as caught:
            check_agreement(plan={"size": "2"}, model=held)
        return str(caught.value)

    told = in_threads(3, check)
    assert told == [told[0]] * 3
    assert "but b is 2 on rank 0 and 3 on rank 2 (1 more differ)" in told[0]


def test_a_second_group_has_the_same_ranks_and_is_another(in_threads: InThreads) -> None:
    def second(rank: int) -> tuple[bool, int, int]:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp_shard", "tp"))
        group = second_group(mesh, "tp")
        return group is mesh.get_group("tp"), group.size(), group.rank()

    assert in_threads(4, second) == [(False, 2, rank % 2) for rank in range(4)]
