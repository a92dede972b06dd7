"""In which order the dims of a global tensor lie in memory, told by the part that a rank has.

[Note: memory order] A layout says which strides the tensor would have on one device, and views,
``contiguous()`` and memory formats go by it; so a rank's part has its dims in memory in that
order. Every rank has to come to the same strides without asking, from parts that may be uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product

import torch
from torch import Tensor

from vescale_dtensor._comm.emulation import RankTensor, of_own_memory
from vescale_dtensor._layout.boxes import local_shape
from vescale_dtensor._layout.layout import Layout, Placements, layout

_Sizes = tuple[int, ...]


def as_laid_out(
    local: Tensor, made: Layout, told: Sequence[int] | None = None
) -> tuple[Tensor, Layout]:
    """Return a part of any strides, and ``made`` with those that the whole has on one device.

    A part is shared whether its dims are permuted, expanded or apart, as those of a slice are.
    It is copied where ranks could not tell the same of the whole: where uneven parts are apart,
    or one has a single index of a dim of which another has several; and where a dim that is cut
    is expanded, since the ranks may repeat different values. It is copied, too, where its dims
    are not in the order of the strides that the whole is ``told`` to have.
    """
    stride = None
    if told is not None and not lies_as(local, told):
        local = _reordered(local, told)
    if not local.is_contiguous():
        mesh_shape = tuple(made.mesh.shape)
        own = tuple(map(int, local.shape)), tuple(map(int, local.stride()))
        stride = _global_stride(*own, tuple(made.shape), mesh_shape, made.placements)
    if stride is None:
        local = _contiguous(local)
    return of_own_memory(local), layout(made.mesh, made.placements, made.shape, stride, made.dtype)


def _contiguous(local: Tensor) -> Tensor:
    """Return a contiguous part; a rank that has one already shares it."""
    if isinstance(local, RankTensor):  # which only looks like that of one rank
        if all(part.is_contiguous() for part in local.parts):
            return local  # writes to it are counted with those to what it is a view of
        return RankTensor([part.contiguous() for part in local.parts])
    return local.contiguous()


@lru_cache(maxsize=1 << 12)
def _global_stride(
    local: _Sizes, stride: _Sizes, shape: _Sizes, mesh_shape: _Sizes, placements: Placements
) -> _Sizes | None:
    """Return the strides of the whole; None if the part does not tell them."""
    shapes = {
        local_shape(shape, mesh_shape, coordinate, placements)
        for coordinate in product(*map(range, mesh_shape))
    }
    dims = range(len(shape))
    if len(local) != len(shape):  # several dims are cut as one
        return None
    if any(stride[d] == 0 and local[d] > 1 and local[d] != shape[d] for d in dims):
        return None
    even = len(shapes) == 1
    if not even and any(part[d] < 2 <= shape[d] for part in shapes for d in dims):
        return None
    found = [0] * len(shape)
    here = whole = 1  # elements that the dims further in span, of the part and of the whole
    for d in sorted(dims, key=lambda d: (stride[d], -d)):
        if stride[d] == 0 and local[d] > 1:
            continue
        apart = local[d] > 1 and stride[d] != here
        if apart and (not even or stride[d] < here):
            return None
        found[d] = stride[d] * whole // here if apart else whole
        here, whole = (stride[d] if apart else here) * local[d], found[d] * shape[d]
    return tuple(found)


def are_alike(part: Tensor, own: Tensor) -> bool:
    """Whether a part is plain memory as another one is, which a layout is known of."""
    return (
        type(part) is type(own) is Tensor
        and part.shape == own.shape
        and part.stride() == own.stride()
        and part.dtype == own.dtype
        and not (part.requires_grad or part.is_neg() or part.is_conj())
    )


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a copy of ``tensor`` has: the same, if nothing is apart."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def dense_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor of ``shape`` whose dims lie as ``stride`` has them."""
    return dense_stride(torch.empty_strided(tuple(shape), tuple(stride), device="meta"))


def in_memory_order(local: Tensor, stride: Sequence[int]) -> Tensor:
    """Return ``local`` with its dims in memory as ``stride`` has them."""
    if _order(stride) == list(range(len(stride))) or local.ndim != len(stride):
        return local
    return _reordered(local, stride)


def _order(stride: Sequence[int]) -> list[int]:
    """Return the dims, outermost in memory first."""
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


def _reordered(local: Tensor, stride: Sequence[int]) -> Tensor:
    order = _order(stride)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return _contiguous(local.permute(order)).permute(inverse)


def lies_as(local: Tensor, stride: Sequence[int]) -> bool:
    """Whether a part has its dims in memory in the order of ``stride``."""
    if local.ndim != len(stride):
        return True
    order = _order(stride)
    parts = local.parts if isinstance(local, RankTensor) else (local,)
    return all(_descends(part, order) for part in parts)


def _descends(part: Tensor, order: Sequence[int]) -> bool:
    steps = [part.stride(dim) for dim in order if part.shape[dim] > 1]
    return not part.numel() or all(a >= b for a, b in pairwise(steps))
