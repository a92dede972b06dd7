"""Sliced tensors that are put together, taken apart, and repeated along other dims than theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .tensor import Along, SlicedTensor

Made = SlicedTensor | None  # None of what concerns the dim along the sequence


def joined(func: Callable[..., Any], tensors: Sequence[Any], dim: int) -> Made:
    """Return ``cat`` or ``stack`` of tensors along a dim."""
    first = next(x for x in tensors if isinstance(x, SlicedTensor))
    along, ndim = first.along, first.local.ndim
    stacks = func is torch.stack
    dim %= ndim + stacks
    if not stacks and dim == along.dim:
        return None
    parts = [like(x, along, along.dim) for x in tensors]
    if any(x is None for x in parts):
        return None
    at = along.dim + (stacks and dim <= along.dim)
    return SlicedTensor.of(func(parts, dim), along.at(at))


def taken_apart(
    func: Callable[..., Any],
    x: SlicedTensor,
    dim: int,
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> tuple[SlicedTensor, ...] | None:
    """Return ``split``, ``chunk`` or ``unbind`` of a tensor along a dim."""
    dim %= x.local.ndim
    if dim == x.along.dim:
        return None
    parts = func(x.local, *args, **named, dim=dim)
    gone = parts[0].ndim < x.local.ndim and dim < x.along.dim
    return tuple(SlicedTensor.of(part, x.along.at(x.along.dim - gone)) for part in parts)


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
