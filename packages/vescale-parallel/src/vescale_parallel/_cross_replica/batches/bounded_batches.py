"""Small batches of calls whose rows have bounds; see [Note: bounds of rows]."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._cross_replica.dims.bounds import Bounds, RowsByBounds, bounds_of
from vescale_parallel._cross_replica.dims.packed_rows import num_rows_of_packed
from vescale_parallel._cross_replica.dims.row_counts import RowDims, row_dim
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._model.inputs import has_dims
from vescale_parallel._model.random_copies import in_double
from vescale_parallel._torch_private import pytree

from .packed_batches import RowsMade

# Of a packed tensor, that all rows but short ones have at least: one each is no bag.
_LEAST = 2

# Bounds, by leaf and table.
_Key = tuple[int, int | None]


def bounded_batches(
    given: Given,
    dims: RowDims,
    num_few: int,
    made: RowsMade,
    grown: Callable[[Tensor], Tensor],
    *,
    has_short: bool = False,
) -> list[Given]:
    """Return a batch of ``num_few`` rows, and both halves of it, with bounds that begin with 0.

    Every row has as many elements as the longest one, with ``has_short`` those of the second half
    have less. ``grown`` makes as many rows of a tensor that has them first.
    """
    leaves, spec = pytree.tree_flatten(given)
    every = _Batch.of(leaves, dims, num_few, has_short)
    whole = every.made(made, grown)
    half = num_few // 2
    parts = [slice(0, num_few), slice(0, half), slice(half, num_few)]
    return [pytree.tree_unflatten(every.cut(whole, part), spec) for part in parts]


class _Batch:
    """The leaves of a call, and how long each row of a small batch is."""

    def __init__(
        self, leaves: Sequence[Any], dims: RowDims, lengths: dict[_Key, list[int]], num_few: int
    ) -> None:
        self._leaves, self._told, self._lengths = leaves, dict(dims), lengths
        self._num_few = num_few
        num_rows = num_rows_of_packed(leaves, self._told.values())
        assert num_rows is not None
        self._num_rows = num_rows

    @staticmethod
    def of(leaves: Sequence[Any], dims: RowDims, num_few: int, has_short: bool) -> _Batch:
        lengths: dict[_Key, list[int]] = {}
        for index, rows in dims:
            if isinstance(rows, RowsByBounds):
                longest = max(_LEAST, *rows.lengths(leaves, index))
                short = longest // 2 if has_short else longest
                half = num_few // 2
                lengths[rows.bounds, rows.table] = [longest] * half + [short] * half
        return _Batch(leaves, dims, lengths, num_few)

    def made(self, made: RowsMade, grown: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return the leaves of all rows; of bounds, the given ones."""
        found: list[Any] = []
        for index, leaf in enumerate(self._leaves):
            rows, dim = self._told.get(index), self._dim(index)
            if not isinstance(leaf, Tensor) or self._kind(index) is not None:
                found.append(leaf)
            elif isinstance(rows, RowsByBounds):
                lengths = self._lengths[rows.bounds, rows.table]
                found.append(_elements(in_double(leaf), lengths, made))
            elif dim is None:
                found.append(in_double(leaf))
            else:
                of_rows = grown(in_double(leaf).movedim(dim, 0))
                if made.filled is not None:
                    made.filled(of_rows)
                found.append(of_rows.movedim(0, dim))
        return found

    def cut(self, whole: Sequence[Any], part: slice) -> list[Any]:
        """Return what some rows have."""
        found: list[Any] = []
        for index, leaf in enumerate(whole):
            rows, dim = self._told.get(index), self._dim(index)
            if (kind := self._kind(index)) is not None:
                tables: list[int | None] = [None] if leaf.dim() == 1 else [*range(len(leaf))]
                each = [self._of_table((index, table)) for table in tables]
                made = [bounds_of(lengths[part], kind) for lengths in each]
                found.append(leaf.new_tensor(made[0] if leaf.dim() == 1 else made))
            elif isinstance(rows, RowsByBounds):
                edges = [0, *itertools.accumulate(self._lengths[rows.bounds, rows.table])]
                found.append(leaf[edges[part.start] : edges[part.stop]].contiguous())
            elif dim is None or not isinstance(leaf, Tensor):
                found.append(leaf)
            else:
                size = part.stop - part.start
                found.append(leaf.narrow(dim, part.start, size).contiguous())
        return found

    def _of_table(self, at: _Key) -> list[int]:
        """Return the lengths of rows in what a table of bounds is of, one if it is of rows."""
        return self._lengths.get(at, [1] * self._num_few)

    def _kind(self, index: int) -> Any:
        rows = self._told.get(index)
        if isinstance(rows, Bounds):
            return rows.kind
        is_of_lengths = any(index == leaf for leaf, _ in self._lengths)
        return "lengths" if is_of_lengths else None

    def _dim(self, index: int) -> int | None:
        leaf = self._leaves[index]
        if not has_dims(leaf) or leaf.layout is not torch.strided:
            return None
        dim = self._told.get(index, row_dim(leaf, self._num_rows))
        return dim if isinstance(dim, int) else None


def _elements(x: Tensor, lengths: Sequence[int], made: RowsMade) -> Tensor:
    """Return the elements of rows of some lengths, each with others of those of all rows."""
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for length, start in zip(lengths, itertools.accumulate(lengths, initial=0), strict=False):
        first = 0 if made.repeats else start
        row = x[[(first + place) % len(x) for place in range(length)]]
        if row.is_floating_point() and first + length > len(x):
            row = row * (1 + 0.1 * torch.rand(row.shape, generator=generator, dtype=row.dtype))
        found.append(row)
    if made.filled is not None and len({*lengths}) == 1:
        rows = torch.stack(found)
        made.filled(rows)
        found = [*rows]
    return torch.cat(found)
