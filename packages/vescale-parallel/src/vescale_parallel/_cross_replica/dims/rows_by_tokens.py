"""Rows of packed tensors by tokens in texts, which stand for their elements.

[Note: packed rows] A batch of texts with images has the images of all rows in one tensor,
(images x channels x height x width), or the patches of all images, (patches x features), beside
their sizes, (images x 3): no dim is as long as there are rows, and where it happens to be it is
not the rows. Which are whose the texts say: a row has a placeholder, a token of the model's
configuration (``image_token_id``), in proportion to what it has in such a tensor. That proportion
is taken from one call and has to be the same in others, so that a token that is there by chance
gives an error and no other row's images. Where elements differ in what they stand for, as images
of several sizes do, their sizes are counted instead of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.inputs import has_dims

from .packed_rows import PackedRows, PackedRowsError, num_rows_of_packed

MOST_SIZES = 3


@dataclass(frozen=True)
class Mark:
    """What is counted in a text: a token, or each run of it, one behind the other, once."""

    token: int
    in_runs: bool = False

    def __str__(self) -> str:
        return f"run of tokens {self.token}" if self.in_runs else f"token {self.token}"


@dataclass(frozen=True)
class RowsByTokens(PackedRows):
    """How many elements rows have, by tokens in texts; see [Note: packed rows].

    Attributes:
        texts: The leaf of a call that tells, (rows x positions) of token ids.
        ratios: Elements for each mark in a text, by mark, the likeliest first; none if every row
            has as many.
        kept: Tokens in the texts that are no words.
        sizes: The leaf of the sizes of elements, which are counted instead of them, if any.
        is_optional: Whether forward takes None where no row has any.
    """

    texts: int
    ratios: tuple[tuple[Mark, Fraction], ...] = ()
    kept: tuple[int, ...] = ()
    sizes: int | None = None
    is_optional: bool = False

    @property
    def is_even(self) -> bool:
        return not self.ratios

    def num_rows(self, leaves: Sequence[Any]) -> int:
        return len(leaves[self.texts])

    def lengths(self, leaves: Sequence[Any], index: int) -> tuple[int, ...]:
        length, num_rows = len(leaves[index]), len(leaves[self.texts])
        if self.is_even and length % num_rows == 0:
            return (length // num_rows,) * num_rows
        weights = None if self.sizes is None else sizes_of_elements(leaves[self.sizes])
        told = counts_of(leaves[self.texts], [mark for mark, _ in self.ratios])
        each = (shared_lengths(length, weights, told[mark], ratio) for mark, ratio in self.ratios)
        if (found := next(filter(None, each), None)) is None:
            said = [f"{ratio} for each {mark}" for mark, ratio in self.ratios]
            raise PackedRowsError(
                f"expected a batch of {num_rows} rows that have, of the {length} elements of a "
                f"tensor of shape {tuple(leaves[index].shape)}, as many as their tokens say "
                f"({' or '.join(said) or 'as many for each row'}), as in earlier calls"
            )
        return found


def common_rows(
    ranks: Sequence[Sequence[tuple[int, RowsByTokens]]],
) -> tuple[tuple[int, RowsByTokens], ...]:
    """Return how rows are packed in a call by what each of several ranks sees in its rows.

    Nothing is said of a leaf of which ranks see something else.
    """
    seen: dict[int, list[RowsByTokens]] = {}
    for index, rows in itertools.chain.from_iterable(ranks):
        seen.setdefault(index, []).append(rows)
    found: dict[int, RowsByTokens] = {}
    for index, each in sorted(seen.items()):
        first = each[0]
        ratios = tuple(x for x in first.ratios if all(x in rows.ratios for rows in each))
        alike = {(rows.texts, rows.sizes, rows.is_even) for rows in each}
        if len(alike) == 1 and (ratios or first.is_even):
            found[index] = replace(first, ratios=ratios)
    return tuple(found.items())


def likely_row(leaves: Sequence[Any], found: Sequence[tuple[int, Any]]) -> int:
    """Return the row of a call with something in most packed leaves, and most tokens for it."""
    packed = [(index, rows) for index, rows in found if isinstance(rows, RowsByTokens)]
    lengths = [rows.lengths(leaves, index) for index, rows in packed]
    kept = kept_tokens(leaves[packed[0][1].texts], packed).sum(1).tolist()

    def likelihood(row: int) -> tuple[int, int]:
        return sum(each[row] > 0 for each in lengths), kept[row]

    return max(range(len(kept)), key=likelihood)


def one_row(
    leaves: Sequence[Any], found: Sequence[tuple[int, Any]], row: int
) -> tuple[list[Any], list[int | None]]:
    """Return the leaves of a call of one row, and the dims that they have it along.

    What ``found`` says nothing of has its rows where it is as long as there are rows.
    """
    num_rows, told = num_rows_of_packed(leaves, (rows for _, rows in found)), dict(found)
    own: list[Any] = []
    dims: list[int | None] = []
    for index, leaf in enumerate(leaves):
        dim, rows = None, told.get(index)
        if isinstance(rows, RowsByTokens):
            dim, leaf = 0, leaf.split(rows.lengths(leaves, index))[row]
        elif has_dims(leaf) and leaf.layout is torch.strided:
            shape = [*leaf.shape]
            dim = told.get(index, shape.index(num_rows) if num_rows in shape else None)
            leaf = leaf if dim is None else leaf.narrow(dim, row, 1)
        own.append(leaf)
        dims.append(dim)
    return own, dims


def kept_tokens(ids: Tensor, found: Sequence[tuple[int, Any]]) -> Tensor:
    """Return where a text has tokens that stand for something: these are no words."""
    kept = {token for _, rows in found if isinstance(rows, RowsByTokens) for token in rows.kept}
    return torch.isin(ids, torch.tensor(sorted(kept), dtype=ids.dtype, device=ids.device))


def shared_lengths(
    length: int, weights: Sequence[int] | None, counts: Sequence[int], ratio: Fraction
) -> tuple[int, ...] | None:
    """Return how many elements rows have by how often each has a mark; None if that is no number.

    ``weights`` are counted instead of elements, if there are some.
    """
    shares = [ratio * count for count in counts]
    if sum(shares) != (length if weights is None else sum(weights)):
        return None
    ends = [*itertools.accumulate(shares)]
    if weights is not None:
        behind = {end: number for number, end in enumerate(itertools.accumulate(weights), 1)}
        if len(weights) != length or not all(end in behind for end in ends if end):
            return None
        ends = [Fraction(behind.get(int(end), 0)) for end in ends]
    if any(end.denominator != 1 for end in ends):
        return None
    return tuple(int(end - start) for start, end in itertools.pairwise([Fraction(0), *ends]))


def counts_of(texts: Tensor, marks: Sequence[Mark]) -> dict[Mark, list[int]]:
    """Return how often each row has each mark."""
    found: list[Tensor] = []
    for mark in marks:
        is_token = texts == mark.token
        if mark.in_runs:
            is_token[:, 1:] &= ~is_token[:, :-1].clone()
        found.append(is_token.sum(1))
    return dict(zip(marks, torch.stack(found).tolist() if found else [], strict=True))


def sizes_of_elements(leaf: Any) -> list[int] | None:
    """Return the sizes of elements, if a leaf may be some: (elements x two or three lengths)."""
    if type(leaf) is not Tensor or leaf.dim() != 2 or not 1 < leaf.shape[1] <= MOST_SIZES:
        return None
    if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool:
        return None
    if leaf.device.type == "meta":
        return None
    sizes = leaf.prod(1).tolist()
    return sizes if sizes and min(sizes) > 0 else None
