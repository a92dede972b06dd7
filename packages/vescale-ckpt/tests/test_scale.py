"""What ranks tell one another does not grow with tensors and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_dtensor import distribute_tensor
from vescale_testing import World


def bytes_gathered(path: str, num_tensors: int) -> tuple[list[int], list[int]]:
    """Save and load half a megabyte; return the sizes of all that is gathered or reduced."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.ones(1 << 17).reshape(num_tensors, -1)
    state = {
        f"layers.{index}.weight": distribute_tensor(full[index], mesh, (Shard(0),))
        for index in range(num_tensors)
    }
    gathered: list[int] = []
    reduced: list[int] = []
    all_gather, all_reduce = dist.all_gather, dist.all_reduce

    def gathering(received: list[torch.Tensor], sent: torch.Tensor, **kwargs: Any) -> Any:
        gathered.append(sent.nbytes)
        return all_gather(received, sent, **kwargs)

    def reducing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", gathering)
        patch.setattr(dist, "all_reduce", reducing)
        vescale_ckpt.save(path, {"model": state})
        vescale_ckpt.load(path, {"model": state})
    return gathered, reduced


def test_messages_do_not_grow_with_the_number_of_tensors(world2: World, tmp_path: Path) -> None:
    few = world2.run(bytes_gathered, str(tmp_path / "few"), 4)
    many = world2.run(bytes_gathered, str(tmp_path / "many"), 1024)
    for (few_gathered, few_reduced), (gathered, reduced) in zip(few, many, strict=True):
        assert gathered == few_gathered
        assert max(gathered) <= 1024
        assert len(gathered) < 12
        assert max(reduced) <= max(few_reduced) + 100
