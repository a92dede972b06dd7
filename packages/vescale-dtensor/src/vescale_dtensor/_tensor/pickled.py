"""Pickles of distributed tensors, of which each has the shard of one rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale_dtensor._layout.layout import Layout

# Of a rank on the mesh; None along an axis whose ranks hold the same.
Place = tuple[int | None, ...]

_OF_TORCH = torch.serialization.DEFAULT_PROTOCOL  # copies and queues of processes have newer ones
_WHOLE = (
    "gather every tensor on all ranks (tensor.full_tensor()) before rank 0 calls torch.save, or "
    "call vescale_ckpt.save, which loads under any other plan"
)


def place_of_shard(layout: Layout, protocol: object) -> Place | None:
    """Return whose shard a pickle of this rank has, None if every rank holds the whole tensor.

    A program that saves files is warned that it is no more than that.
    """
    coordinate = layout.mesh.get_coordinate()
    if coordinate is None or layout.is_replicated or layout.mesh.size() == 1:
        return None
    if protocol == _OF_TORCH:
        warnings.warn(
            "a distributed tensor was pickled (by torch.save of a state_dict() for example), "
            "which holds this rank's shard alone: it loads on this rank, under the same plan, and "
            f"nowhere else. To have the whole, {_WHOLE}",
            stacklevel=3,
        )
    return tuple(
        None if isinstance(placement, Replicate) else index
        for index, placement in zip(coordinate, layout.placements, strict=True)
    )


def owned(mesh: DeviceMesh, place: Place | None) -> DeviceMesh:
    """Return the mesh of a shard that was pickled; refuse one that another rank has pickled.

    Raises:
        ValueError: With whose it is.
    """
    if place is None or not dist.is_initialized():
        return mesh
    rank = dist.get_rank()
    own = (mesh.mesh == rank).nonzero().flatten().tolist()
    if len(own) != len(place) or any(p not in (None, i) for p, i in zip(place, own, strict=True)):
        raise ValueError(
            f"expected the shard of rank {rank} of a distributed tensor, at {tuple(own)} of its "
            f"mesh, got the one that a rank at {place} has pickled. A pickle holds one rank's "
            f"shard: {_WHOLE}"
        )
    return mesh


def as_it_was(tensor: Tensor, *, requires_grad: bool, is_parameter: bool) -> Any:
    """Return a tensor as what was pickled: a parameter, something that has a gradient."""
    made = nn.Parameter(tensor, False) if is_parameter else tensor
    return made.requires_grad_(requires_grad)
