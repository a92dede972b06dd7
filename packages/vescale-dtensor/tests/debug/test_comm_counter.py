"""What a block communicates, counted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import (
    CommCounter,
    all_gather,
    all_reduce,
    all_to_all,
    distribute_tensor,
    emulate,
    reduce_scatter,
)
from vescale_dtensor._comm.primitives import all_gather_rows, all_to_all_rows
from vescale_dtensor._debug.comm_counter import CommTotal
from vescale_testing import World


def _each_once(mesh: DeviceMesh, x: Tensor) -> None:
    """64 float32 on 4 ranks: a share of 3/4 is 192 bytes."""
    all_gather(x[:16], mesh)
    all_to_all(x, mesh)
    reduce_scatter(x.view(4, 16), mesh)
    reduce_scatter(x.view(4, 16), mesh, order="library")
    all_reduce(x, mesh)
    all_reduce(x, mesh, order="library")


EXPECTED = {
    "all_gather": CommTotal(2, 384),
    "all_to_all": CommTotal(3, 576),
    "reduce_scatter": CommTotal(1, 192),
    "all_reduce": CommTotal(1, 384),
}


def test_every_collective_is_counted_with_its_bytes() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        with CommCounter() as counter:
            _each_once(mesh, torch.ones(64))
        all_gather(torch.ones(64), mesh)
    assert counter.by_kind == EXPECTED
    assert (counter.num_collectives, counter.nbytes) == (7, 384 + 576 + 192 + 384)
    assert {(e.axes, e.num_ranks, e.dtype) for e in counter.events} == {((0, 1), 4, torch.float32)}


def _on_rank() -> CommCounter:
    group = dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (4,))
    with CommCounter() as counter:
        _each_once(mesh, torch.ones(64))
    assert counter.by_kind == EXPECTED
    with CommCounter() as of_group:
        all_gather(torch.ones(16), group)
    assert of_group.events[0].mesh is None
    assert " ".join(str(of_group).split()[-9:-3]) == "all_gather group 4 float32 1 192"
    return counter


def test_processes_count_what_emulated_ranks_count(world4: World) -> None:
    assert [counter.by_kind for counter in world4.run(_on_rank)] == [EXPECTED] * 4


def test_what_placements_are_made_of_is_counted() -> None:
    with emulate(4) as world:
        mesh = init_device_mesh("cpu", (2, 2))
        flat = world.per_rank(lambda rank: torch.ones(6))
        with CommCounter() as counter:
            all_gather_rows(flat, mesh, (1,))
            all_to_all_rows([flat[:2], flat[2:]], None, mesh, (0,))
    assert [(e.kind, e.axes, e.nbytes) for e in counter.events] == [
        ("all_gather", (1,), 24),
        ("all_to_all", (0,), 16),
    ]


def test_a_redistribution_is_counted() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.ones(8, 4), mesh, (Shard(0),))
        with CommCounter() as counter:
            x.redistribute(mesh, (Replicate(),))
            x.redistribute(mesh, (Shard(1),))
    # 2 rows go to 3 others; of 8 elements, 2 stay.
    assert counter.by_kind == {"all_gather": CommTotal(1, 96), "all_to_all": CommTotal(1, 24)}


def test_the_backward_pass_is_counted() -> None:
    with emulate(4) as world:
        mesh = init_device_mesh("cpu", (4,))
        x = world.per_rank(lambda rank: torch.ones(8)).requires_grad_()
        y = all_gather(x, mesh)
        with CommCounter() as counter:
            y.sum().backward()
    assert counter.by_kind == {"all_to_all": CommTotal(1, 96)}


def test_counters_nest_and_go_on_counting_when_entered_again() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        with CommCounter() as outer:
            all_gather(torch.ones(1), mesh)
            with CommCounter() as inner:
                all_gather(torch.ones(1), mesh)
            with inner:
                all_gather(torch.ones(1), mesh)
    assert (outer.num_collectives, inner.num_collectives) == (3, 2)


def test_a_counter_is_not_entered_twice_at_once() -> None:
    with CommCounter() as counter, pytest.raises(RuntimeError, match="counting already"):
        counter.__enter__()
    with counter:
        pass


def test_a_counter_stops_after_an_error() -> None:
    counter = CommCounter()
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(KeyError), counter:
            raise KeyError
        all_gather(torch.ones(1), mesh)
    assert not counter.events


def test_a_counter_prints_as_a_table() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with CommCounter() as counter:
            all_gather(torch.ones(1000, dtype=torch.bfloat16), mesh, axes="tp")
            all_gather(torch.ones(1000, dtype=torch.bfloat16), mesh, axes="tp")
            all_to_all(torch.ones(8), mesh)
    assert str(counter).splitlines() == [
        "collective  over   ranks  dtype     calls  bytes sent",
        "all_gather  tp         2  bfloat16      2       4,000",
        "all_to_all  dp+tp      4  float32       1          24",
        "total                                   3       4,024",
    ]
    assert str(CommCounter()).splitlines()[-1].split() == ["total", "0", "0"]
