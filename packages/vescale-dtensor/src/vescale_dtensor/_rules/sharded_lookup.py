"""Look up global indices in the part of a dim that a rank has.

[Note: masked lookup] A rank looks up the indices that it has and gives -0.0, which changes no
sum, for all others; the result is a pending sum. An index that no rank has, which is an error on
one device, is an error on every rank: none may go on to a collective that the others left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._sharding.op_call import Function, RankView

from .decompositions import held_ranges, is_cut


@dataclass(frozen=True)
class Part:
    """What a rank has of one dim.

    Attributes:
        size: Of the dim, globally.
        runs: First index, last plus one, and where the first is in the rank's part.
    """

    size: int
    runs: tuple[tuple[int, int, int], ...]

    def positions(self, index: Tensor, *, elsewhere: int = 0) -> tuple[Tensor, Tensor]:
        """Return where indices are in the rank's part, and which of them are there.

        Those of other ranks get the position ``elsewhere``; those of no rank one that every
        operator refuses.
        """
        exists = (index >= 0) & (index < self.size)
        positions = torch.where(exists, elsewhere, self.size + 1)
        here = torch.zeros_like(index, dtype=torch.bool)
        for start, stop, place in self.runs:
            inside = (index >= start) & (index < stop)
            positions = torch.where(inside, index - (start - place), positions)
            here |= inside
        return positions.to(index.dtype), here

    def wrapped(self, index: Tensor) -> Tensor:
        """Return ``index`` with negative ones counted from the end."""
        return torch.where(index < 0, index + self.size, index)


def part_of_dim(local: RankView, dim: int, *, index: int = 0) -> Part | None:
    """Return what the rank has of ``dim`` of an input, None if it has all."""
    made: Layout = local.inputs[index]
    if not is_cut(made, (dim,)):
        return None
    ranges = held_ranges(made, local.coordinate, dim)
    places = accumulate((stop - start for start, stop in ranges), initial=0)
    runs = tuple((start, stop, at) for (start, stop), at in zip(ranges, places, strict=False))
    return Part(made.shape[dim], runs)


def masked(
    dim: int, lookup: Callable[[Tensor, Tensor], Tensor], part: Part, base: Tensor, index: Tensor
) -> Tensor:
    """Return ``lookup(base, positions)``, with nothing where the rank does not have the index.

    ``lookup`` returns a tensor to which the shape of ``index``, with trailing dims of size 1 where
    ``lookup`` appends dims, can be broadcast.
    """
    positions, here = part.positions(index)
    found = lookup(with_row(base, dim), positions)
    while here.ndim < found.ndim:
        here = here.unsqueeze(-1)
    return found.masked_fill(~here, nothing(found.dtype))


def with_row(base: Tensor, dim: int) -> Tensor:
    """Return ``base``, or one row of nothing if it has none, so that lookups still check."""
    if base.shape[dim]:
        return base
    shape = [*base.shape]
    shape[dim] = 1
    return base.new_full(shape, nothing(base.dtype))


def nothing(dtype: torch.dtype) -> Any:
    """Return what added to a number gives the number: -0.0, since 0.0 turns -0.0 into 0.0."""
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        return complex(-0.0, -0.0)
    return -0.0 if dtype.is_floating_point else 0


def when_cut(
    operator: Function, dim: int, run: Callable[[Part], Function]
) -> Callable[[RankView], Function]:
    """Return the ``function`` of a signature: ``run`` if the first input's ``dim`` is cut."""

    def function(local: RankView) -> Function:
        part = part_of_dim(local, dim)
        return operator if part is None else run(part)

    return function
