"""Views of sliced tensors: where the sequence is in them, and what of it a rank has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .tensor import Along, SlicedTensor

Made = Tensor | None  # None of what is no such view
_NUM_DIMS = 2  # that a transposition is of


def indexed(x: SlicedTensor, index: Any) -> Made:
    """Return ``x[index]`` of slices, integers and None, with step 1 along the sequence."""
    given = _spelled(x.local.ndim, index)
    if given is None:
        return None
    at = _place_of(given, x.along.dim)
    if not isinstance(given[at], slice):
        return None  # one position, which one rank has
    along = x.along
    first, end, step = given[at].indices(along.length)
    is_all = (first, end) == (0, along.length)
    if step != 1 or (along.count > 1 and not is_all):
        return None
    given[at] = slice(None)
    dim = sum(not isinstance(each, int) for each in given[:at])
    rest = SlicedTensor.of(x.local[tuple(given)], along.at(dim))
    return rest if is_all else narrowed(rest, first, max(end, first))


def narrowed(x: SlicedTensor, first: int, end: int) -> Made:
    """Return the positions from ``first`` until before ``end``: plain, if every rank has them."""
    along = x.along
    left = along.slices.narrowed(first, end)
    if along.count > 1 or not left.length:
        return None
    local = along.slices.narrow(x.local, along.dim, along.ranks.rank, first, end)
    return local if left.is_whole else SlicedTensor.of(local, replace(along, slices=left))


def _spelled(ndim: int, index: Any) -> list[Any] | None:
    """Return an index with a slice for every dim that it says nothing of."""
    given: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is Ellipsis or _is_basic(each) for each in given):
        return None
    missing = ndim - sum(map(_is_basic, given))
    if Ellipsis not in given:
        given.append(Ellipsis)
    at = given.index(Ellipsis)
    given[at : at + 1] = [slice(None)] * missing
    return given


def _is_basic(each: Any) -> bool:
    return isinstance(each, slice) or (isinstance(each, int) and not isinstance(each, bool))


def _place_of(given: Sequence[Any], dim: int) -> int:
    """Return where in an index a dim is, of which None is not one."""
    return [at for at, each in enumerate(given) if each is not None][dim]


def reshaped(
    x: SlicedTensor, shape: Sequence[int], reshape: Callable[[Tensor, Sequence[int]], Tensor]
) -> Made:
    """Return a view with the sequence in a dim, or folded into one with those before it."""
    along, local = x.along, x.local
    whole = along.whole_shape(local.shape)
    if -1 in shape:
        rest = math.prod(size for size in shape if size != -1)
        if not rest:
            return None
        shape = [math.prod(whole) // rest if size == -1 else size for size in shape]
    if math.prod(shape) != math.prod(whole):
        return None
    found = _dim_in(along, whole, shape)
    if found is None:
        return None
    dim, count = found
    here = count * along.slices.sizes[along.ranks.rank]
    return SlicedTensor.of(
        reshape(local, (*shape[:dim], here, *shape[dim + 1 :])), along.at(dim, count)
    )


def _dim_in(along: Along, whole: Sequence[int], shape: Sequence[int]) -> tuple[int, int] | None:
    """Return which dim of a view the sequence is in, and how often."""
    length = along.slices.length
    outer = math.prod(whole[: along.dim]) * along.count  # sequences one after the other
    for dim, size in enumerate(shape):
        before = math.prod(shape[:dim])
        count, rest = divmod(size, length)
        if not rest and count and before * count == outer:
            return dim, count
    return None


def transposed(x: SlicedTensor, order: Sequence[int]) -> SlicedTensor:
    """Return a tensor with its dims in another order."""
    return SlicedTensor.of(x.local.permute(*order), x.along.at([*order].index(x.along.dim)))


def swapped(x: SlicedTensor, dim: int, other: int) -> SlicedTensor:
    """Return a tensor with two dims in each other's place."""
    order = [*range(x.local.ndim)]
    order[dim], order[other] = order[other], order[dim]
    return transposed(x, order)


def order_of(name: str, ndim: int, args: Sequence[Any]) -> list[int] | None:
    """Return in which order a call has dims: of transpose and its kind, or permute."""
    flat = [
        *itertools.chain(*(each if isinstance(each, tuple | list) else [each] for each in args))
    ]
    if not all(isinstance(each, int) for each in flat):
        return None
    dims = [each % ndim for each in flat]
    if name == "permute":
        return dims if sorted(dims) == [*range(ndim)] else None
    order = [*range(ndim)]
    if len(dims) == _NUM_DIMS:
        order[dims[0]], order[dims[1]] = dims[1], dims[0]
        return order
    return None


def unsqueezed(x: SlicedTensor, dim: int) -> SlicedTensor:
    """Return a tensor with one dim more."""
    dim %= x.local.ndim + 1
    return SlicedTensor.of(x.local.unsqueeze(dim), x.along.at(x.along.dim + (dim <= x.along.dim)))


def squeezed(x: SlicedTensor, dim: int) -> Made:
    """Return a tensor without a dim, which is not along the sequence."""
    dim %= x.local.ndim
    if dim == x.along.dim:
        return None
    is_gone = x.local.shape[dim] == 1
    at = x.along.dim - (is_gone and dim < x.along.dim)
    return SlicedTensor.of(x.local.squeeze(dim), x.along.at(at))
