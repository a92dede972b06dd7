"""Local shards: this rank's memory of a tensor, and which boxes of the whole lie there.

[Note: per-rank tensors]
A tensor of which each rank has its own is stored as one tensor with a leading dim of the number
of ranks, of which every rank holds a row. So it is written, checked and read like any tensor
that is sharded over all ranks.

[Note: strided shards]
Where FSDP2 cuts what tensor parallelism has cut along the same dim, torch lists FSDP2's axis
first, though it was the last to cut, and marks it as strided over the number of cuts before it.
With the axes in the order of the cuts every one is an ordinary ``Shard``, even or uneven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.parameter import is_lazy

import vescale_dtensor
from vescale_ckpt._format.byte_ranges import ByteRanges, byte_ranges_of
from vescale_ckpt._format.dtypes import DTYPES, NAMES
from vescale_ckpt._format.file_layout import StoredTensor
from vescale_ckpt._torch_private import StridedShard, spec_of
from vescale_ckpt.exceptions import CheckpointError
from vescale_dtensor import Box, InterleavedShard, LocalBox, local_boxes

# Before torch 2.13 veScale's is no subclass of torch's.
_DISTRIBUTED = (DTensor, vescale_dtensor.DTensor)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# What to do about a tensor of another class, by the name of that.
_REMEDIES = {
    "ShardedTensor": "FullyShardedDataParallel(.., device_mesh=init_device_mesh(..)) has DTensors "
    "in its sharded state dicts instead",
    "AsyncCollectiveTensor": "wait for the collective, with its wait()",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardLayout:
    """How a tensor lies on the ranks; tensors that lie the same way share one.

    Two are told apart by their identity, which makes them good keys of caches.

    Attributes:
        boxes: The boxes of the whole tensor that lie in this rank's memory.
        is_first_replica: Whether no rank before this one holds the same boxes.
        is_whole: Whether every rank of the mesh, or simply every rank, holds all of the tensor.
        mesh_ranks: Ranks of the tensor's mesh in the order of their coordinates; None for a
            plain tensor, which is whole on every rank.
        mesh_shape: Number of ranks along each mesh axis.
        placements: How the mesh shares the tensor, one per mesh axis.
        text: What is equal on all ranks that see the same mesh and placements.
    """

    boxes: tuple[LocalBox, ...]
    is_first_replica: bool
    is_whole: bool
    mesh_ranks: tuple[int, ...] | None
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    text: str


class LocalShard(NamedTuple):
    """What a rank holds of a tensor.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Name of its dtype in safetensors.
        local: This rank's memory, without gradient history.
        layout: Which boxes lie there, and where the others are.
    """

    shape: tuple[int, ...]
    dtype: str
    local: torch.Tensor
    layout: ShardLayout

    @property
    def boxes(self) -> tuple[LocalBox, ...]:
        """The boxes of the whole tensor that lie in ``local``."""
        return self.layout.boxes

    @property
    def identity(self) -> Any:
        """Something equal for parts that are the same memory seen the same way.

        None if there is no memory to compare.
        """
        local = self.local
        if not local.numel():
            return None
        return (*view_of(local), self.shape, self.layout.text)


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what is equal for tensors that are the same memory seen the same way."""
    place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    # Conjugation and negation are lazy: one memory holds a tensor and its conjugate.
    return (*place, tensor.is_conj(), tensor.is_neg())


def is_distributed(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, torch's or veScale's."""
    return isinstance(tensor, _DISTRIBUTED)


def local_shard_of(key: str, tensor: torch.Tensor, rank: int) -> LocalShard:
    """Return this rank's shard of a tensor, if that can be stored or filled as plain bytes.

    Cheapest under ``torch.no_grad()``.

    Raises:
        CheckpointError: With ``key`` and what to do.
    """
    if is_lazy(tensor):
        raise CheckpointError(
            f"tensor {key!r} of a lazy module has no shape yet; call the module once first"
        )
    if not is_distributed(tensor):
        # A parameter of a class of its own that is detached is a plain tensor.
        is_bare = not (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter))
        local = tensor if is_bare else tensor.detach()
        dtype = _checked_dtype(key, local)
        return LocalShard(local.shape, dtype, local, _plain_layout(local.shape, rank == 0))
    local, spec = tensor.to_local(), spec_of(tensor)
    if local.requires_grad:
        local = local.detach()
    dtype = _checked_dtype(key, local)
    try:
        layout = _layout(spec.shape, spec.mesh, spec.placements, rank)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"tensor {key!r}{error}") from error
    return LocalShard(spec.shape, dtype, local, layout)


def stacked_shard(key: str, tensor: torch.Tensor, rank: int, num_ranks: int) -> LocalShard:
    """Return this rank's shard of the tensor in which the tensors of all ranks are stacked."""
    shard = local_shard_of(key, tensor, rank)
    if shard.layout.mesh_ranks is not None:
        raise CheckpointError(f"{key!r} is a DTensor, which has no place in PerRank")
    shape = (num_ranks, *shard.shape)
    layout = ShardLayout(
        boxes=(_row(shape, rank),),
        is_first_replica=True,
        is_whole=False,
        mesh_ranks=tuple(range(num_ranks)),
        mesh_shape=(num_ranks,),
        placements=(Shard(0),),
        text=f"per rank of {num_ranks}",
    )
    return LocalShard(shape, shard.dtype, shard.local[None], layout)


def shard_of_row(shard: LocalShard, shape: tuple[int, ...], row: int) -> LocalShard:
    """Return the shard that fills a plain tensor from one row of a stacked one of ``shape``."""
    layout = replace(shard.layout, boxes=(_row(shape, row),))
    return LocalShard(shape, shard.dtype, shard.local[None], layout)


def _row(shape: tuple[int, ...], row: int) -> LocalBox:
    dims = len(shape) - 1
    return LocalBox(Box((row, *(0,) * dims), (1, *shape[1:])), (0,) * (dims + 1))


def located(shard: LocalShard, stored: StoredTensor) -> Iterator[tuple[torch.Tensor, ByteRanges]]:
    """Yield the memory of each box that is not empty, and where it lies, in file order."""
    local = shard.local
    for held, ranges in _ranges_of_boxes(shard.layout, stored.shape, stored.dtype):
        memory = local if held.box.shape == local.shape else held.of(local)
        yield memory, ranges.shifted(stored.offset)


# Models repeat the same layer many times; a hit costs a twentieth of the computation.
@lru_cache(maxsize=4096)
def _ranges_of_boxes(
    layout: ShardLayout, shape: tuple[int, ...], dtype: str
) -> tuple[tuple[LocalBox, ByteRanges], ...]:
    """Return the boxes that are not empty, and where they lie in a tensor at byte 0."""
    itemsize = DTYPES[dtype].itemsize
    full = (held for held in layout.boxes if held.box.numel)
    boxes = [(held, byte_ranges_of(shape, held.box, itemsize)) for held in full]
    return tuple(sorted(boxes, key=lambda box: box[1].start))


def _checked_dtype(key: str, local: torch.Tensor) -> str:
    """Return the name of the dtype of a tensor, if that is one of plain bytes in memory."""
    kind = type(local).__name__
    if type(local) not in _PLAIN:
        remedy = _REMEDIES.get(kind, "convert it to a dense torch.Tensor")
        raise CheckpointError(f"tensor {key!r} is a {kind}, which has no plain bytes; {remedy}")
    dtype = NAMES.get(local.dtype)
    if local.layout is not torch.strided or local.is_nested:
        layout = "nested" if local.is_nested else str(local.layout)
        raise CheckpointError(
            f"tensor {key!r} is a {kind} of layout {layout}, which has no plain bytes; convert it "
            f"to a dense tensor"
        )
    if local.is_meta:
        raise CheckpointError(f"tensor {key!r} is on the meta device; give it memory first")
    if dtype is None:
        raise CheckpointError(
            f"tensor {key!r} has {local.dtype}, which safetensors cannot hold; {_way_out(local)}"
        )
    return dtype


def _way_out(local: torch.Tensor) -> str:
    if local.is_complex():
        return "store torch.view_as_real(tensor)"
    if local.is_quantized:
        return "store tensor.int_repr(), its scale and its zero point"
    return "store its bytes, tensor.view(torch.uint8)"


@lru_cache(maxsize=4096)
def _plain_layout(shape: torch.Size, is_first_replica: bool) -> ShardLayout:
    return ShardLayout(
        boxes=(LocalBox(Box.whole(shape), (0,) * len(shape)),),
        is_first_replica=is_first_replica,
        is_whole=True,
        mesh_ranks=None,
        mesh_shape=(),
        placements=(),
        text="",
    )


@lru_cache(maxsize=4096)
def _layout(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int
) -> ShardLayout:
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f" has placements {placements}: its value is still to be reduced; redistribute it to "
            f"Shard or Replicate first"
        )
    order, placements = _in_order_of_cuts(tuple(mesh.shape), placements)
    mesh_shape = tuple(mesh.shape[axis] for axis in order)
    own = mesh.get_coordinate()
    coordinate = None if own is None else [own[axis] for axis in order]
    try:
        understood = _understood(shape, mesh_shape, placements)
        # A rank outside the mesh holds nothing, but has to find the same mistakes.
        somewhere = tuple(coordinate or (0,) * len(mesh_shape))
        boxes = local_boxes(tuple(shape), mesh_shape, somewhere, understood)
    except (TypeError, ValueError) as error:
        raise ValueError(f": {error}") from error
    mesh_ranks = _ranks_of(mesh, order)
    return ShardLayout(
        boxes=() if coordinate is None else boxes,
        is_first_replica=coordinate is not None and is_first_replica(coordinate, understood),
        is_whole=all(isinstance(placement, Replicate) for placement in understood),
        mesh_ranks=mesh_ranks,
        mesh_shape=mesh_shape,
        placements=understood,
        text=sha256(repr((mesh_ranks, mesh_shape, understood)).encode()).hexdigest(),
    )


@lru_cache(maxsize=64)
def _ranks_of(mesh: DeviceMesh, order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(mesh.mesh.permute(order).flatten().tolist())


def _in_order_of_cuts(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """Return the mesh's axes in the order in which they cut; see [Note: strided shards].

    With them come their placements. A strided one that no later cuts explain stays what it is.
    """
    made = list(placements)
    order = list(range(len(mesh_shape)))
    for axis in reversed(range(len(mesh_shape))):
        strided = made[axis]
        if not isinstance(strided, StridedShard):
            continue
        later = [
            other
            for other in order[order.index(axis) + 1 :]
            if made[other].is_shard(strided.dim) and not isinstance(made[other], StridedShard)
        ]
        if later and math.prod(mesh_shape[other] for other in later) == strided.split_factor:
            order.remove(axis)
            order.insert(order.index(later[-1]) + 1, axis)
            made[axis] = Shard(strided.dim)
    return tuple(order), tuple(made[axis] for axis in order)


def is_first_replica(coordinate: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Return whether no coordinate before this one holds the same boxes."""
    return not any(
        index
        for index, placement in zip(coordinate, placements, strict=True)
        if isinstance(placement, Replicate)
    )


def _understood(
    shape: torch.Size, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[Placement, ...]:
    """Return the placements in the words of :func:`vescale_dtensor.local_boxes`."""
    return tuple(
        _interleaved(shape, size, placement) if isinstance(placement, StridedShard) else placement
        for size, placement in zip(mesh_shape, placements, strict=True)
    )


def _interleaved(shape: torch.Size, num_ranks: int, placement: StridedShard) -> Placement:
    shards = int(placement.split_factor)
    if shape[placement.dim] % (shards * num_ranks):
        raise ValueError(
            f"{placement!r} over {num_ranks} ranks is supported for a tensor dim that is a "
            f"multiple of {shards * num_ranks}, got shape {tuple(shape)}"
        )
    return InterleavedShard(placement.dim, shards)
