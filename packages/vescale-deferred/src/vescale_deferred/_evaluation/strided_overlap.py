"""Which part of a strided window lies in another one? Integers only.

[Note: frames] Two windows on one storage, such as a row of a matrix and a block of it, are put in
a *frame*: strides d[0] > d[1] > ... > 1, each a multiple of the next, so that every element has
one coordinate along each (a mixed radix number). The strides of both windows and 1 make up the
frame. A window that is a range along every frame dim overlaps with another in a range along each;
slices, transposed and reshaped views and steps are of that kind. The rest is not sliceable: the
storage is then evaluated whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vescale_dtensor.random import Window


class NotSliceable(Exception):
    """A part cannot be computed without the rest."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A range along one frame dim, as seen from one dim of a window.

    Attributes:
        dim: The dim of the window.
        multiplier: How many indices of ``dim`` one step along the frame dim is.
        start: First coordinate, relative to the window's own.
        count: Number of coordinates.
    """

    dim: int
    multiplier: int
    start: int
    count: int


# A part of a window, as a product of ranges. An index along ``dim`` is the sum over the factors of
# that dim of multiplier * coordinate.
Part = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """What two windows share.

    Attributes:
        in_first: Where it is in the first window.
        in_second: Where it is in the second one; factor by factor the same elements.
        is_all_of_second: Whether that is the whole second window.
    """

    in_first: Part
    in_second: Part
    is_all_of_second: bool


def overlap(first: Window, second: Window) -> Overlap | None:
    """Return what two windows on one storage share, None if nothing.

    Raises:
        NotSliceable: If it is not a product of ranges.
    """
    if first.dtype != second.dtype:
        raise NotSliceable
    if not first.numel or not second.numel:
        return None
    strides = _frame(first, second)
    a, b = _ranges(first, strides), _ranges(second, strides)
    in_first: list[Factor] = []
    in_second: list[Factor] = []
    is_all = True
    for stride, x, y in zip(strides, a, b, strict=True):
        low, high = max(x.start, y.start), min(x.start + x.count, y.start + y.count)
        if low >= high:
            return None
        count = high - low
        is_all = is_all and count == y.count
        in_first.append(_factor(first, x, stride, low, count))
        in_second.append(_factor(second, y, stride, low, count))
    return Overlap(tuple(in_first), tuple(in_second), is_all)


def select(window: Window, part: Part) -> Window:
    """Return the window on the elements that ``part`` picks, one dim for each factor.

    The window is any of the shape that ``part``, from :func:`overlap`, was made for; factors of no
    dim only add a dim of size one.
    """
    offset = window.offset
    strides: list[int] = []
    for factor in part:
        stride = window.stride[factor.dim] * factor.multiplier if factor.dim >= 0 else 0
        strides.append(stride)
        offset += factor.start * stride
    return Window(tuple(f.count for f in part), tuple(strides), offset, window.dtype)


def broadcast(window: Window, shape: Sequence[int]) -> Window:
    """Return ``window`` expanded to ``shape``."""
    missing = len(shape) - len(window.shape)
    strides = (0,) * missing + tuple(
        0 if size == 1 else stride
        for size, stride in zip(window.shape, window.stride, strict=True)
    )
    return Window(tuple(shape), strides, window.offset, window.dtype)


@dataclass(slots=True)
class _Range:
    start: int
    count: int = 1
    dim: int = -1


def _frame(first: Window, second: Window) -> list[int]:
    strides = {1}
    for window in (first, second):
        strides.update(
            stride for stride, size in zip(window.stride, window.shape, strict=True) if size > 1
        )
    if 0 in strides:
        raise NotSliceable
    chain = sorted(strides, reverse=True)
    if any(wide % narrow for wide, narrow in pairwise(chain)):
        raise NotSliceable
    return chain


def _ranges(window: Window, strides: Sequence[int]) -> list[_Range]:
    """Return the range of ``window`` along every frame dim."""
    # How many coordinates a frame dim has until the next wider one takes over.
    extents = [math.inf, *(w // n for w, n in pairwise(strides))]
    rest = window.offset
    ranges: list[_Range] = []
    for stride in strides:
        ranges.append(_Range(rest // stride))
        rest %= stride
    for dim, (size, stride) in enumerate(zip(window.shape, window.stride, strict=True)):
        if size > 1:
            _spread(ranges, extents, strides.index(stride), dim, size)
    return ranges


def _spread(ranges: list[_Range], extents: Sequence[float], at: int, dim: int, size: int) -> None:
    """Give a window dim its frame dim, and the next wider ones if it fills that."""
    found = ranges[at]
    if found.dim >= 0:  # two window dims along one frame dim, such as a diagonal: no product
        raise NotSliceable
    found.dim = dim
    if found.start + size <= extents[at]:
        found.count = size
        return
    # The window dim carries over: a flattened view has one dim where the frame has several. It
    # is still a product of ranges if it begins at 0 and goes all the way round, so that every
    # coordinate here meets every coordinate of the wider frame dim.
    extent = int(extents[at])
    if found.start or size % extent:
        raise NotSliceable
    found.count = extent
    _spread(ranges, extents, at - 1, dim, size // extent)


def _factor(window: Window, own: _Range, stride: int, low: int, count: int) -> Factor:
    multiplier = 0 if own.dim < 0 else stride // window.stride[own.dim]
    return Factor(own.dim, multiplier, low - own.start, count)
