"""Find bounds of rows among the tensors of a call, by their values; see [Note: bounds of rows]."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.inputs import has_dims, usual_num_rows
from vescale_parallel._torch_private import pytree

from .bounds import Bounds, Kind, RowsByBounds, edges_of
from .packed_rows import PackedRows

# The ones that say most come first: a tensor with both ends fits "starts" and "ends", too.
_KINDS: tuple[Kind, ...] = ("both", "starts", "ends", "owners", "lengths")
# Of bounds that are looked at, and of ways to read a call that are tried.
_MOST_VALUES, _MOST_WAYS = 2**16, 12

Dims = tuple[tuple[int, int | PackedRows | None], ...]


@dataclass(frozen=True)
class _Row:
    """Integers that may be bounds: a tensor, or one row of a tensor of several tables."""

    leaf: int
    table: int | None
    values: tuple[int, ...]

    def fits(self, length: int, kind: Kind) -> bool:
        return edges_of(self.values, kind, length) is not None

    def num_rows(self, kind: Kind) -> int:
        return self.values[-1] + 1 if kind == "owners" else len(self.values) - (kind == "both")


def bounded_dims(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Dims, ...]:
    """Return what may be packed in a call, and what the bounds of its rows, the likeliest first.

    Of other tensors shapes tell. A run of the model tells which is right, if any is.
    """
    call = _Call.of((tuple(args), dict(kwargs)))
    found = (way for kind in _KINDS for rows in call.bounds(kind) for way in call.ways(rows, kind))
    return tuple(itertools.islice(dict.fromkeys(found), _MOST_WAYS))


@dataclass(frozen=True)
class _Call:
    """The leaves of a call, and the lists that it has of tensors, as numbers of leaves."""

    leaves: Sequence[Any]
    lists: Sequence[tuple[int, ...]]

    @staticmethod
    def of(call: Any) -> _Call:
        leaves = pytree.tree_leaves(call)
        try:
            pairs, _ = pytree.tree_flatten_with_path(call)
        except ValueError:  # a class that does not say how its parts are called
            return _Call(leaves, ())
        found: dict[Any, list[int]] = {}
        for index, (path, _) in enumerate(pairs):
            if isinstance(path[-1], pytree.SequenceKey) and len(path) > 2:
                found.setdefault(path[:-1], []).append(index)
        return _Call(leaves, [tuple(each) for each in found.values()])

    def bounds(self, kind: Kind) -> Iterator[list[_Row]]:
        """Yield what may be bounds of as many rows each, together, of a kind.

        A list, as of all tables; or one tensor; or all that are bounds of something, since there
        are labels in order, too.
        """
        firsts = {len(x) for x in self.leaves if has_dims(x)}
        fitting: dict[int, list[_Row]] = {}
        for index, leaf in enumerate(self.leaves):
            rows = _rows_in(index, leaf)
            is_flat = kind != "owners" or len(rows) == 1
            if rows and is_flat and all(any(r.fits(n, kind) for n in firsts) for r in rows):
                fitting[index] = rows
        whole = (each for each in self.lists if fitting.keys() >= {*each})
        units = [[row for i in each for row in fitting[i]] for each in whole]
        units += fitting.values()
        by_length: dict[int, list[list[_Row]]] = {}
        for unit in units:
            counts = {row.num_rows(kind) for row in unit}
            if len(counts) == 1 and max(counts) > 1:
                by_length.setdefault(counts.pop(), []).append(unit)
        for alike in by_length.values():
            yield from alike
            if len(alike) > 1:
                yield [*dict.fromkeys(row for unit in alike for row in unit)]

    def ways(self, rows: Sequence[_Row], kind: Kind) -> Iterator[Dims]:
        """Yield what may be packed with some bounds."""
        bounds, num_rows = {row.leaf for row in rows}, rows[0].num_rows(kind)
        others = {
            i: x
            for i, x in enumerate(self.leaves)
            if i not in bounds and has_dims(x) and x.layout is torch.strided and len(x)
        }
        are_as_many = all(row.fits(num_rows, kind) for row in rows)
        found = (
            self._of_one(rows[0], others, kind)
            if len(rows) == 1
            else self._of_lists(rows, others, kind)
        )
        for of_row in found:
            has_longer = any(len(others[i]) != num_rows for i in of_row)
            if has_longer or are_as_many:
                yield _told(of_row, rows, self.leaves, kind)
        if kind == "starts" and are_as_many and usual_num_rows(self.leaves) == num_rows:
            yield _told({}, rows, self.leaves, kind)  # as many indices as rows, in all tables

    def _of_one(
        self, row: _Row, others: Mapping[int, Tensor], kind: Kind
    ) -> Iterator[dict[int, _Row]]:
        """Yield what is as long as each other, integers first; of as many as rows, vectors."""
        num_rows = row.num_rows(kind)
        fitting = {i: len(x) for i, x in others.items() if row.fits(len(x), kind)}
        ids = [i for i in fitting if _is_of_ids(others[i])]
        for length in dict.fromkeys(fitting[i] for i in ids or fitting):
            alike = [i for i, other in fitting.items() if other == length]
            if length != num_rows:
                yield dict.fromkeys(alike, row)
                continue
            # Labels are vectors as long as these, too.
            of_one = [i for i in ids if i in alike]
            rest = [i for i in alike if i not in ids and others[i].dim() == 1]
            for each in ([*of_one, *rest], *([i, *rest] for i in of_one), *([i] for i in of_one)):
                yield dict.fromkeys(each, row)

    def _of_lists(
        self, rows: Sequence[_Row], others: Mapping[int, Tensor], kind: Kind
    ) -> Iterator[dict[int, _Row]]:
        """Yield lists whose k-th tensors have the k-th bounds, or so many tensors of integers."""

        def told(each: Sequence[int]) -> dict[int, _Row]:
            pairs = dict(zip(each, rows, strict=False))
            fits = all(i in others and row.fits(len(others[i]), kind) for i, row in pairs.items())
            return pairs if fits and len(pairs) == len(rows) else {}

        lists = [*filter(None, map(told, self.lists))]
        if len(lists) > 1:
            yield {i: row for each in lists for i, row in each.items()}
        yield from lists
        ids = [i for i, x in others.items() if _is_of_ids(x)]
        for first in range(len(ids) - len(rows) + 1 if not lists else 0):
            if found := told(ids[first : first + len(rows)]):
                yield found


def _rows_in(index: int, leaf: Any) -> list[_Row]:
    if not has_dims(leaf) or leaf.dtype not in (torch.int64, torch.int32) or leaf.dim() > 2:
        return []
    if leaf.device.type == "meta" or leaf.layout is not torch.strided:
        return []
    if not 0 < leaf.numel() <= _MOST_VALUES:
        return []
    values = leaf.tolist()
    if leaf.dim() == 1:
        return [_Row(index, None, tuple(values))]
    return [_Row(index, table, tuple(each)) for table, each in enumerate(values)]


def _told(
    packed: Mapping[int, _Row], rows: Sequence[_Row], leaves: Sequence[Any], kind: Kind
) -> Dims:
    told: dict[int, int | PackedRows | None] = {
        index: RowsByBounds(row.leaf, kind, row.table) for index, row in packed.items()
    }
    for index in {row.leaf for row in rows}:
        last = leaves[index].dim() - 1
        told[index] = last if kind == "lengths" else Bounds(index, last, kind)
    return tuple(sorted(told.items()))


def _is_of_ids(leaf: Tensor) -> bool:
    return leaf.dim() == 1 and leaf.dtype in (torch.int64, torch.int32)
