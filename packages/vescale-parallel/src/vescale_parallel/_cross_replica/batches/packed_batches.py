"""Small batches of calls with packed tensors: one row, and rows made of it; see rows_by_tokens.py.

Rows that have as much each in every packed tensor tell where rows lie in what a module makes of
them, and few rows of a batch are alike in that. So all are made of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._cross_replica.dims.row_counts import RowDims
from vescale_parallel._cross_replica.dims.rows_by_tokens import (
    RowsByTokens,
    kept_tokens,
    likely_row,
    one_row,
)
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._model.inputs import some_that_count
from vescale_parallel._model.random_copies import in_double
from vescale_parallel._torch_private import pytree


@dataclass(frozen=True)
class RowsMade:
    """How the rows of a small batch differ.

    Attributes:
        repeats: Not at all.
        thinned: What masks, of all rows, are replaced with.
        filled: What is done to the words of all rows, if anything.
    """

    repeats: bool
    thinned: Callable[[Tensor], Tensor]
    filled: Callable[[Tensor], None] | None


def packed_batches(given: Given, dims: RowDims, num_few: int, made: RowsMade) -> list[Given]:
    """Return a batch of ``num_few`` rows, and both halves of it."""
    leaves, spec = pytree.tree_flatten(given)
    own, where = one_row(leaves, dims, likely_row(leaves, dims))
    told = dict(dims)
    texts = {x.texts for x in told.values() if isinstance(x, RowsByTokens)}
    is_kept = kept_tokens(own[next(iter(texts))], dims)
    half = num_few // 2
    kept = (slice(0, num_few), slice(0, half), slice(half, num_few))
    batches: list[list[Any]] = [[], [], []]
    for index, (leaf, dim) in enumerate(zip(own, where, strict=True)):
        if dim is None:
            rows = None
            leaf = in_double(leaf) if isinstance(leaf, Tensor) else leaf
        elif isinstance(told.get(index), RowsByTokens) and index not in texts:
            rows = _others(in_double(leaf), num_few, made)
        else:
            rows = _rows(in_double(leaf).movedim(dim, 0), num_few, made, is_kept, index in texts)
            rows = [row.movedim(0, dim) for row in rows]
        for batch, part in zip(batches, kept, strict=True):
            batch.append(leaf if rows is None else torch.cat(rows[part], dim or 0).contiguous())
    return [pytree.tree_unflatten(batch, spec) for batch in batches]


def _rows(x: Tensor, num_few: int, made: RowsMade, is_kept: Tensor, is_text: bool) -> list[Tensor]:
    """Return rows (1, ...) made of one; tokens of a text that are no words stay."""
    if x.is_floating_point():
        return [*made.thinned(torch.cat(_others(x, num_few, made))).split(1)]
    rows = x.expand(num_few, *x.shape[1:]).clone()
    words = ~is_kept[0] if is_kept.shape == x.shape else None
    if is_text and words is not None and not made.repeats:
        for number, row in enumerate(rows):
            row[words] = row[words].roll(number)
    rows = made.thinned(some_that_count(rows))
    if made.filled is not None and words is not None and not bool(((x == 0) | (x == 1)).all()):
        of_words = rows[:, words]
        made.filled(of_words)
        rows[:, words] = of_words
    return [*rows.split(1)]


def _others(x: Tensor, num_few: int, made: RowsMade) -> list[Tensor]:
    """Return as many tensors, with other numbers where these are no integers."""
    generator = torch.Generator().manual_seed(0)
    is_varied = (
        x.is_floating_point() and not made.repeats and not bool(((x == 0) | (x == 1)).all())
    )
    if not is_varied:
        return [x] * num_few
    noise = [torch.rand(x.shape, generator=generator, dtype=x.dtype) for _ in range(1, num_few)]
    return [x, *(x * (1 + 0.1 * each) for each in noise)]
