"""Bounds of rows: where the rows of packed tensors begin or end, or how long each is.

[Note: bounds of rows] ``nn.EmbeddingBag`` is given the indices of all rows in one tensor and, as
``offsets``, where every row begins. Attention over documents has ``cu_seqlens``, which end with
the length of all, point clouds say where each ends, or which element is whose, and
``torch.segment_reduce`` takes lengths.
Whatever they say is of one call: those of fewer rows begin with 0 again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree

from .packed_rows import PackedRows, PackedRowsError

# What there is one of for each row; of bounds with both ends one more, of owners, the rows that
# elements are of, one for each element.
Kind = Literal["starts", "ends", "both", "lengths", "owners"]


@dataclass(frozen=True)
class Bounds(PackedRows):
    """Of a tensor: it has bounds of rows, along its last dim; nothing is packed in it.

    Attributes:
        leaf: Which one of a call.
        dim: The last one.
        kind: What they are.
    """

    leaf: int
    dim: int
    kind: Kind

    @property
    def is_even(self) -> bool:
        return True

    def num_rows(self, leaves: Sequence[Any]) -> int:
        return num_rows_of_bounds(leaves[self.leaf], self.kind)

    def lengths(self, leaves: Sequence[Any], index: int) -> tuple[int, ...]:
        return (1,) * self.num_rows(leaves)


@dataclass(frozen=True)
class RowsByBounds(PackedRows):
    """How many elements of a packed tensor rows have, by bounds; see [Note: bounds of rows].

    Attributes:
        bounds: The leaf of a call that has them.
        kind: What they are.
        table: Which of several rows of bounds, in a tensor of two dims.
    """

    bounds: int
    kind: Kind
    table: int | None = None

    def num_rows(self, leaves: Sequence[Any]) -> int:
        return num_rows_of_bounds(leaves[self.bounds], self.kind)

    def lengths(self, leaves: Sequence[Any], index: int) -> tuple[int, ...]:
        length, num_rows = len(leaves[index]), self.num_rows(leaves)
        values = leaves[self.bounds] if self.table is None else leaves[self.bounds][self.table]
        edges = edges_of(values.tolist(), self.kind, length)
        if edges is not None:
            return tuple(stop - start for start, stop in itertools.pairwise(edges))
        if length == num_rows:
            return (1,) * num_rows  # by chance as long as what is packed, in an earlier call
        raise PackedRowsError(
            f"expected a batch of {num_rows} rows of which a tensor has the {self.kind} in "
            f"another one, of {length} elements as in earlier calls, got {values.tolist()}"
        )


def leaves_of_bounds(told: Sequence[tuple[int, Any]]) -> frozenset[int]:
    """Return the leaves of a call that are said to be bounds of rows."""
    packed = {rows.bounds for _, rows in told if isinstance(rows, RowsByBounds)}
    return frozenset(packed | {rows.leaf for _, rows in told if isinstance(rows, Bounds)})


def num_rows_of_bounds(bounds: Tensor, kind: Kind) -> int:
    """Return of how many rows a tensor has bounds."""
    if kind == "owners":
        return int(bounds[-1]) + 1
    return bounds.shape[-1] - (kind == "both")


def edges_of(values: Sequence[int], kind: Kind, length: int) -> list[int] | None:
    """Return where rows begin and, the last one, end; None if these are no bounds of any.

    Example:
        >>> edges_of([0, 2, 2], "starts", 5)
        [0, 2, 2, 5]
    """
    edges = [*values]
    if kind == "owners":
        if len(edges) != length or edges[:1] != [0] or edges != sorted(edges):
            return None
        return [bisect_left(edges, row) for row in range(edges[-1] + 2)]
    if kind == "lengths":
        edges = [*itertools.accumulate(edges, initial=0)]
    if kind == "ends":
        edges.insert(0, 0)
    if kind == "starts":
        edges.append(length)
    is_rising = all(start <= stop for start, stop in itertools.pairwise(edges))
    return edges if is_rising and edges[:1] == [0] and edges[-1] == length else None


def bounds_of(lengths: Sequence[int], kind: Kind) -> list[int]:
    """Return the bounds of rows of these lengths.

    Example:
        >>> bounds_of([2, 0, 3], "starts")
        [0, 2, 2]
    """
    edges = [*itertools.accumulate(lengths, initial=0)]
    if kind == "lengths":
        return [*lengths]
    if kind == "owners":
        return [row for row, length in enumerate(lengths) for _ in range(length)]
    return edges[int(kind == "ends") : len(edges) - (kind == "starts")]


def bounds_within(bounds: Tensor, kind: Kind, start: int, size: int) -> Tensor:
    """Return the bounds of ``size`` rows from ``start`` on, of which the first begins with 0."""
    if kind == "owners":
        first, stop = torch.searchsorted(bounds, bounds.new_tensor([start, start + size])).tolist()
        return bounds[first:stop] - start
    if kind == "lengths":
        return bounds.narrow(-1, start, size)
    if kind == "ends":
        part = bounds.narrow(-1, start, size)
        return part - bounds.narrow(-1, start - 1, 1) if start else part
    part = bounds.narrow(-1, start, size + (kind == "both"))
    return part - part.narrow(-1, 0, 1)


@dataclass(frozen=True)
class GivenBounds:
    """Bounds that a model is given for all rows of a small batch, and for parts of them.

    Modules that it gives them to get what begins with 0 again, too, for parts of the rows.

    Attributes:
        each: By what they are: for all rows, and for every part.
    """

    each: tuple[tuple[Kind, Tensor, tuple[Tensor, ...]], ...] = ()

    @staticmethod
    def of(told: Sequence[tuple[int, Any]], whole: Any, parts: Sequence[Any]) -> GivenBounds:
        """Return those of calls, in which it is told where the rows are."""
        leaves, of_parts = pytree.tree_leaves(whole), [pytree.tree_leaves(x) for x in parts]
        found: list[tuple[Kind, Tensor, tuple[Tensor, ...]]] = []
        for index, rows in told:
            if isinstance(rows, Bounds):
                every: list[Tensor] = [leaves[index], *(each[index] for each in of_parts)]
                tables = zip(*every, strict=True) if every[0].dim() > 1 else ()
                for whole_bounds, *parts_bounds in [every, *tables]:
                    found.append((rows.kind, whole_bounds, tuple(parts_bounds)))
        return GivenBounds(tuple(found))

    def kind(self, whole: Any, x: Any, part: int) -> Kind | None:
        """Return what bounds a tensor has, given that for all rows and for a part of them."""
        if not (isinstance(whole, Tensor) and isinstance(x, Tensor)) or not self.each:
            return None
        for kind, of_all, of_parts in self.each:
            is_alike = whole.dtype == x.dtype == of_all.dtype and not whole.is_nested
            if is_alike and torch.equal(whole, of_all) and torch.equal(x, of_parts[part]):
                return kind
        return None
