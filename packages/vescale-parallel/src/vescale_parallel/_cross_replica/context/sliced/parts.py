"""Sliced tensors that are put together, taken apart, and repeated.

[Note: two sequences behind each other] Blocks of two streams, as of text and image, join both for
attention and take them apart behind it. One of them may be whole on every rank, with what is
computed of it. Joined, ranks have their slices of one and all of the other: positions of which
some are one rank's and some every rank's (:class:`.slices.SequenceSlices`). Of the latter each
rank has another part of the gradient, as of all that is whole in a block. What is summed over such
positions would count some of them once a rank, and gets the whole instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_parallel._cross_replica.context.slices import Range, SequenceSlices

from .tensor import Along, SlicedTensor
from .views import narrowed

Made = SlicedTensor | None  # None of what concerns the dim along the sequence


def joined(func: Callable[..., Any], tensors: Sequence[Any], dim: int) -> Made:
    """Return ``cat`` or ``stack`` of tensors along a dim."""
    first = next(x for x in tensors if isinstance(x, SlicedTensor))
    along, ndim = first.along, first.local.ndim
    stacks = func is torch.stack
    dim %= ndim + stacks
    if not stacks and dim == along.dim:
        return _behind_each_other(tensors, along)
    parts = [like(x, along, along.dim) for x in tensors]
    if any(x is None for x in parts):
        return None
    at = along.dim + (stacks and dim <= along.dim)
    return SlicedTensor.of(func(parts, dim), along.at(at))


def _behind_each_other(tensors: Sequence[Any], along: Along) -> Made:
    """Return sequences behind each other; only in blocks, see the note above."""
    if not along.in_blocks:
        return None
    dim, ranks = along.dim, along.ranks
    ranges: list[list[Range]] = [[] for _ in range(ranks.size)]
    parts, end = list[Tensor](), 0
    # torch joins with an empty tensor of one dim, as a cache that is empty has it.
    for x in (x for x in tensors if x.shape != (0,)):
        is_sliced = isinstance(x, SlicedTensor)
        local = x.local if is_sliced else x
        if isinstance(local, DTensor) or (is_sliced and (x.along.dim, x.along.count) != (dim, 1)):
            return None
        length = x.along.length if is_sliced else x.shape[dim]
        of_ranks = x.along.slices.ranges if is_sliced else (((0, length),),) * ranks.size
        for mine, found in zip(ranges, of_ranks, strict=True):
            mine += [(end + first, end + last) for first, last in found if first < last]
        parts.append(local)
        end += length
    slices = SequenceSlices(tuple(tuple(mine) or ((0, 0),) for mine in ranges))
    return SlicedTensor.of(torch.cat(parts, dim), replace(along, slices=slices))


def padded(x: SlicedTensor, pad: Sequence[int], value: float) -> Made:
    """Return positions with others before and behind them, which have one value each."""
    if min(pad) < 0:
        return None
    shape = list(x.local.shape)
    before, behind = ([*shape[: x.along.dim], size, *shape[x.along.dim + 1 :]] for size in pad)
    made = [x.local.new_full(each, value) for each in (before, behind)]
    return _behind_each_other([made[0], x, made[1]], x.along)


def taken_apart(
    func: Callable[..., Any],
    x: SlicedTensor,
    dim: int,
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> tuple[Tensor, ...] | None:
    """Return ``split``, ``chunk`` or ``unbind`` of a tensor along a dim."""
    dim %= x.local.ndim
    if dim == x.along.dim:
        return _sequences_of(func, x, args, named)
    parts = func(x.local, *args, **named, dim=dim)
    gone = parts[0].ndim < x.local.ndim and dim < x.along.dim
    return tuple(SlicedTensor.of(part, x.along.at(x.along.dim - gone)) for part in parts)


def _sequences_of(
    func: Callable[..., Any], x: SlicedTensor, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Tensor, ...] | None:
    """Return what ``split`` or ``chunk`` makes of the positions themselves."""
    if "unbind" in func.__name__:
        return None
    places = torch.arange(x.along.length)
    sizes = [part.numel() for part in func(places, *args, **named)]
    ends = [0, *itertools.accumulate(sizes)]
    found = [narrowed(x, first, end) for first, end in itertools.pairwise(ends)]
    parts = tuple(part for part in found if part is not None)
    return parts if len(parts) == len(found) else None


def expanded(x: SlicedTensor, sizes: Sequence[int]) -> Made:
    """Return ``x.expand(*sizes)``."""
    along, more = x.along, len(sizes) - x.local.ndim
    dim = along.dim + more
    if sizes[dim] not in (-1, along.length):
        return None
    return SlicedTensor.of(x.local.expand(*sizes[:dim], -1, *sizes[dim + 1 :]), along.at(dim))


def repeated(x: SlicedTensor, counts: Sequence[int]) -> Made:
    """Return ``x.repeat(*counts)``."""
    along, more = x.along, len(counts) - x.local.ndim
    if counts[along.dim + more] != 1:
        return None
    return SlicedTensor.of(x.local.repeat(*counts), along.at(along.dim + more))


def like(given: Any, along: Along, dim: int) -> Tensor | None:
    """Return this rank's part of a tensor with the sequence in ``dim``; None if it has it not."""
    if isinstance(given, SlicedTensor):
        is_like = given.along.is_like(along) and given.along.dim == dim
        return given.local if is_like else None
    if not isinstance(given, Tensor) or given.ndim <= dim or given.shape[dim] != along.length:
        return None
    return along.part(given, dim)
