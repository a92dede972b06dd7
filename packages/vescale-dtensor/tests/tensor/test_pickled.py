"""A pickle of a distributed tensor has one rank's shard, and says so."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import RaggedShard, distribute_tensor
from vescale_testing import World

ALONE = r"this rank's shard alone.*full_tensor\(\).*vescale_ckpt\.save"


def _saved_by_rank_0(path: str, placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x: Any = nn.Parameter(distribute_tensor(torch.arange(6.0), mesh, (placement,)))
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=ALONE):
            torch.save({"x": x}, path)
    dist.barrier()
    if dist.get_rank() == 0:
        found = torch.load(path)["x"]
        assert torch.equal(found.to_local(), x.to_local())
        assert isinstance(found, nn.Parameter)
    else:
        message = r"shard of rank 1 of a .*, got the one that a rank at \(0,\) has pickled"
        with pytest.raises(Exception, match=message):
            torch.load(path)


@pytest.mark.parametrize("placement", [Shard(0), RaggedShard((0,), 1, (6, 0)), Partial()], ids=str)
def test_a_shard_of_another_rank_is_refused(
    world2: World, tmp_path: Path, placement: Placement
) -> None:
    world2.run(_saved_by_rank_0, str(tmp_path / "x.pt"), placement)


def _each_its_own(directory: str) -> None:
    mesh, path = init_device_mesh("cpu", (2,)), f"{directory}/{dist.get_rank()}.pt"
    x = distribute_tensor(torch.arange(5.0), mesh, (Shard(0),))
    with pytest.warns(UserWarning, match=ALONE):
        torch.save(x, path)
    found = torch.load(path)
    assert torch.equal(found.to_local(), x.to_local())
    assert torch.equal(found.full_tensor(), torch.arange(5.0))


def test_every_rank_loads_its_own(world2: World, tmp_path: Path) -> None:
    world2.run(_each_its_own, str(tmp_path))


def _whole(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x: Any = distribute_tensor(torch.arange(5.0), mesh, (Replicate(),))
    if dist.get_rank() == 0:
        torch.save(x, path)
    dist.barrier()
    assert torch.equal(torch.load(path).full_tensor(), torch.arange(5.0))


def test_what_every_rank_holds_whole_loads_on_every_rank(world2: World, tmp_path: Path) -> None:
    world2.run(_whole, str(tmp_path / "x.pt"))


def _copies(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(4.0), mesh, (Replicate(), Shard(0)))
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=ALONE):
            torch.save(x, path)
    dist.barrier()
    if dist.get_rank() % 2 == 0:
        assert torch.equal(torch.load(path).to_local(), x.to_local())
    else:
        with pytest.raises(Exception, match=r"got the one that a rank at \(None, 0\)"):
            torch.load(path)


def test_ranks_that_hold_the_same_shard_load_it(world4: World, tmp_path: Path) -> None:
    world4.run(_copies, str(tmp_path / "x.pt"))


def _alone() -> None:
    mesh, file = init_device_mesh("cpu", (1,)), io.BytesIO()
    x = distribute_tensor(torch.arange(5.0), mesh, (Shard(0),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file).full_tensor(), torch.arange(5.0))


def test_a_rank_alone_has_the_whole(world1: World) -> None:
    world1.run(_alone)
