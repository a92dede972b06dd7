"""Whose values distribute_tensor takes, and what it sends for that."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import CommCounter, InterleavedShard, RaggedShard, distribute_tensor, emulate
from vescale_testing import World

PLACEMENTS: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(0)),
    (Partial(), Shard(0)),
    (RaggedShard((0, 1), 1, (7, 23)), Replicate()),
    (InterleavedShard(1, 3), Shard(0)),
    (Shard(0), InterleavedShard(1, (2, 4))),
]


def _values() -> Tensor:
    return torch.arange(30.0).reshape(5, 6).t().contiguous().t()


def _check_source() -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    for placements in PLACEMENTS:
        for source in (0, 1):
            # On the diagonal of the mesh are ranks 0 and 3.
            held = _values() if rank == 3 * source else torch.full((6, 5), -1.0).t()
            made = distribute_tensor(held, mesh, placements, src_data_rank=source)
            assert made.stride() == held.stride()
            assert torch.equal(made.full_tensor(), _values())
            with CommCounter() as counter:
                own = distribute_tensor(_values() + rank, mesh, placements, src_data_rank=None)
                own.to_local()
            assert not counter.num_collectives
    flags = torch.tensor([rank == 0, True])
    assert distribute_tensor(flags, mesh, src_data_rank=0).tolist() == [True, True]
    scalar = torch.tensor(float(rank))
    assert distribute_tensor(scalar, mesh, src_data_rank=1).item() == 3.0


def test_values_come_from_the_rank_that_is_named(world4: World) -> None:
    world4.run(_check_source)


def test_a_source_that_is_not_on_the_mesh_is_refused() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        made = distribute_tensor(torch.arange(3.0), mesh, (Shard(0),), src_data_rank=1)
        assert made.tolist() == [0.0, 1.0, 2.0]
        for source in (-1, 2):
            with pytest.raises(ValueError, match="along every axis"):
                distribute_tensor(torch.ones(2), mesh, src_data_rank=source)


def test_a_distributed_tensor_is_returned_or_refused() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        made = distribute_tensor(torch.arange(3.0), mesh, (Shard(0),))
        assert distribute_tensor(made, mesh, (Shard(0),)) is made
        with pytest.raises(ValueError, match=r"redistribute\(\) it"):
            distribute_tensor(made, mesh, (Replicate(),))
