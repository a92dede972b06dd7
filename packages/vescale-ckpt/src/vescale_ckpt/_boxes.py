"""This rank's part of a tensor: its memory, and which boxes of the whole lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

import vescale_dtensor
from vescale_dtensor import Box, InterleavedShard, LocalBox, local_boxes

from ._dtypes import NAMES
from ._torch_private import StridedShard
from .exceptions import CheckpointError

# Before torch 2.13 veScale's is no subclass of torch's.
_DISTRIBUTED = (DTensor, vescale_dtensor.DTensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank holds of a tensor.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Name of its dtype in safetensors.
        local: This rank's memory, without gradient history.
        boxes: The boxes of the whole tensor that lie in ``local``.
        is_first_replica: Whether no rank before this one holds the same boxes.
        mesh_ranks: Ranks of the tensor's mesh in the order of their coordinates; None for a
            plain tensor, which is whole on every rank.
        mesh_shape: Number of ranks along each mesh axis.
        placements: How the mesh shares the tensor, one per mesh axis.
    """

    shape: tuple[int, ...]
    dtype: str
    local: torch.Tensor
    boxes: tuple[LocalBox, ...]
    is_first_replica: bool
    mesh_ranks: tuple[int, ...] | None
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the mesh, or simply every rank, holds all of the tensor."""
        return all(isinstance(placement, Replicate) for placement in self.placements)

    @property
    def identity(self) -> Any:
        """Something equal for parts that are the same memory seen the same way.

        None if there is no memory to compare.
        """
        local = self.local
        if not local.numel():
            return None
        view = (local.data_ptr(), local.device, local.dtype, local.shape, local.stride())
        return (*view, self.shape, self.mesh_ranks, self.placements)


def part_of(key: str, tensor: torch.Tensor, rank: int) -> Part:
    """Return this rank's part of a tensor, if that can be stored or filled as plain bytes.

    Raises:
        CheckpointError: With ``key`` and what to do.
    """
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, _DISTRIBUTED) else tensor.detach()
    _check(key, local)
    if isinstance(tensor, _DISTRIBUTED):
        return _part_of_dtensor(key, tensor, local)
    return Part(
        shape=tuple(tensor.shape),
        dtype=NAMES[tensor.dtype],
        local=local,
        boxes=(LocalBox(Box.whole(tensor.shape), (0,) * tensor.dim()),),
        is_first_replica=rank == 0,
        mesh_ranks=None,
        mesh_shape=(),
        placements=(),
    )


def _check(key: str, local: torch.Tensor) -> None:
    plain = type(local) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or local.layout is not torch.strided or local.is_quantized:
        raise CheckpointError(
            f"tensor {key!r} is a {type(local).__name__} of layout {local.layout}, which has no "
            f"plain bytes; convert it to a dense tensor"
        )
    if local.device.type == "meta":
        raise CheckpointError(f"tensor {key!r} is on the meta device; give it memory first")
    if local.dtype not in NAMES:
        raise CheckpointError(
            f"tensor {key!r} has {local.dtype}, which safetensors cannot hold; convert it "
            f"(complex128: torch.view_as_real)"
        )


def _part_of_dtensor(key: str, tensor: DTensor, local: torch.Tensor) -> Part:
    mesh = tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            f"tensor {key!r} has placements {tensor.placements}: its value is still to be "
            f"reduced; redistribute it to Shard or Replicate first"
        )
    coordinate = mesh.get_coordinate()
    # A rank outside the mesh holds nothing, but has to find the same mistakes.
    somewhere = coordinate or (0,) * len(mesh.shape)
    try:
        placements = _understood(tensor)
        boxes = _boxes(tuple(tensor.shape), tuple(mesh.shape), tuple(somewhere), placements)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"tensor {key!r}: {error}") from error
    first = coordinate is not None and is_first_replica(coordinate, placements)
    return Part(
        shape=tuple(tensor.shape),
        dtype=NAMES[tensor.dtype],
        local=local,
        boxes=() if coordinate is None else boxes,
        is_first_replica=first,
        mesh_ranks=_ranks_of(mesh),
        mesh_shape=tuple(mesh.shape),
        placements=tuple(placements),
    )


# Models repeat the same layer many times; a hit costs a twentieth of the computation.
@lru_cache(maxsize=1024)
def _boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[LocalBox, ...]:
    return local_boxes(shape, mesh_shape, coordinate, placements)


@lru_cache(maxsize=64)
def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def is_first_replica(coordinate: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Return whether no coordinate before this one holds the same boxes."""
    return not any(
        index
        for index, placement in zip(coordinate, placements, strict=True)
        if isinstance(placement, Replicate)
    )


def _understood(tensor: DTensor) -> tuple[Placement, ...]:
    """Return the placements in the words of :func:`vescale_dtensor.local_boxes`."""
    return tuple(
        _interleaved(tensor, tensor.device_mesh.shape[axis], placement)
        if isinstance(placement, StridedShard)
        else placement
        for axis, placement in enumerate(tensor.placements)
    )


def _interleaved(tensor: DTensor, num_ranks: int, placement: StridedShard) -> Placement:
    parts = int(placement.split_factor)
    if tensor.shape[placement.dim] % (parts * num_ranks):
        raise ValueError(
            f"{placement!r} over {num_ranks} ranks is supported for a tensor dim that is a "
            f"multiple of {parts * num_ranks}, got shape {tuple(tensor.shape)}"
        )
    return InterleavedShard(placement.dim, parts)
