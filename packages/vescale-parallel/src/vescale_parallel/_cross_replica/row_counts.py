"""Which dim of a call's tensors the rows may be along, by shapes; a run tells, see call_guard.py.

The rule is [Note: which dim is the batch] in ``_model/inputs.py``; here is what is tried besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vescale_parallel._model.inputs import is_shared_by_rows, opened, usual_num_rows
from vescale_parallel._torch_private import pytree

# Numbers of rows that are tried where more than one dim may be the rows.
_MOST_GUESSES = 3


def is_one_a_row(value: list[Any] | tuple[Any, ...], num_rows: int) -> bool:
    """Whether a list has something for every row, rather than tensors of all rows."""
    if len(value) != num_rows or num_rows == 0:
        return False
    tensors = [each for each in value if isinstance(each, Tensor)]
    return not tensors or any(row_dim(x, num_rows) is None for x in tensors)


def row_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return how many rows a call may have, the likeliest first.

    Most tensors have the rows as their first dim; in (time x batch x features) beside targets
    of (batch) they are what the tensors share.
    """
    shapes = shapes_with_rows(args, kwargs)
    firsts = [shape[0] for shape in shapes]
    sizes = dict.fromkeys(size for shape in shapes for size in shape)

    def likelihood(size: int) -> tuple[int, int]:
        shared = sum(size in shape for shape in shapes)
        return shared + firsts.count(size), shared

    return sorted(sizes, key=likelihood, reverse=True)


def shapes_with_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of a call's tensors that tell where its rows are."""
    leaves = pytree.tree_leaves((list(map(opened, args)), dict(kwargs)))
    shapes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor) and x.dim()]
    return [shape for shape in shapes if not is_shared_by_rows(shape, shapes)]


def num_rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the rows of the batch that a call has, 0 if it has no tensor."""
    return next(iter(row_counts(args, kwargs)), 0)


def row_dim(tensor: Tensor, num_rows: int) -> int | None:
    """Return the first dim of a tensor that is as long as there are rows."""
    shape = tuple(tensor.shape)
    return shape.index(num_rows) if num_rows in shape else None


def likely_row_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the numbers of rows to try: what most tensors share, and what is usual."""
    counts, shapes = row_counts(args, kwargs), shapes_with_rows(args, kwargs)
    shared = [sum(count in shape for shape in shapes) for count in counts]
    likely = [c for c, n in zip(counts, shared, strict=True) if n == shared[0]][:_MOST_GUESSES]
    usual = usual_num_rows((args, kwargs))
    return likely if usual is None or usual in likely else [*likely, usual]
