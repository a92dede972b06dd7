"""Batches that are lists with something for every row: pictures of any size, and what is in them.

[Note: rows in lists] Detectors are called with a list of pictures and a list of dicts, each with
the boxes of one. No tensor of such a call has a dim of rows, so shapes tell nothing: the length of
the lists is the number of rows, and a check takes fewer elements for fewer rows. Losses of such a
model are put together in a loop over the lists, from sums over as many boxes as a row has, and no
structure shows what they are a mean of. So they are taken for means over rows if they are also
where rows have other numbers of boxes, or none, and pictures of another width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.inputs import has_dims, opened
from vescale_parallel._model.random_copies import in_double
from vescale_parallel._torch_private import pytree

from .row_counts import OF_ONE_ROW, RowDims

Given = tuple[tuple[Any, ...], dict[str, Any]]


def rows_in_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return how many rows a call has if lists have something for each, None if tensors tell.

    Lists of one length, one of them of tensors, beside another list or tensors of so many rows.
    Tensors that all share a length may be columns of a batch, and are taken for these first.
    """
    count = _length_of_lists(args, kwargs)
    return None if count is None or _may_be_columns(args, kwargs) else count


def unclear_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[RowDims, ...]:
    """Return where rows are if what may be columns are lists with something for every row."""
    if _length_of_lists(args, kwargs) is None or not _may_be_columns(args, kwargs):
        return ()
    return (dims_of_lists(args, kwargs),)


def _length_of_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    given = [x for x in (*args, *kwargs.values()) if any(map(has_dims, _leaves(x)))]
    lists = [x for x in given if _is_list(x)]
    counts = {len(x) for x in lists}
    if len(given) < 2 or len(counts) != 1 or not any(all(map(has_dims, x)) for x in lists):
        return None
    (count,) = counts
    return count if all(_is_list(x) or _has_rows(x, count) for x in given) else None


def _may_be_columns(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    tensors = [x for x in _leaves((tuple(args), dict(kwargs))) if has_dims(x)]
    return bool(set[int].intersection(*({*x.shape} for x in tensors)) - {1})


def dims_of_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowDims:
    """Return that leaves are of one row each, of a call in which lists have one for each."""
    leaves = _leaves((tuple(args), dict(kwargs)))
    of_lists = [x for each in (*args, *kwargs.values()) if _is_list(each) for x in _leaves(each)]
    ids = {id(x) for x in of_lists if isinstance(x, Tensor)}
    return tuple((index, OF_ONE_ROW) for index, x in enumerate(leaves) if id(x) in ids)


def uneven_lists(given: Given, num_rows: int) -> Iterator[list[Given]]:
    """Yield batches of four rows with both halves, whose second half has less in each row.

    The rows with most and least of a call, then the same with one box less, with none, and with
    pictures of half the width.
    """
    sizes = [_numel(given, index) for index in range(num_rows)]
    most, least = sizes.index(max(sizes)), sizes.index(min(sizes))
    if sizes[most] != sizes[least]:
        yield _halves(given, (most, _as_it_is), (least, _as_it_is))
    width = next((x.shape[-1] for x in _leaves(_lists(given)) if has_dims(x)), 0)
    for less in (_with_fewer(1), _with_fewer(None), _narrow(width)):
        yield _halves(given, (most, _as_it_is), (most, less))


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(opened(tree))


def _is_list(value: object) -> bool:
    return type(value) in (list, tuple) and bool(value)


def _has_rows(value: Any, count: int) -> bool:
    return all(len(x) == count for x in _leaves(value) if has_dims(x))


def _lists(given: Given) -> list[Any]:
    return [x for x in (*given[0], *given[1].values()) if _is_list(x)]


def _numel(given: Given, index: int) -> int:
    rows = [each[index] for each in _lists(given)]
    return sum(x.numel() for x in _leaves(rows) if has_dims(x))


# What is made of what a list has for a row.
_Less = Callable[[Any], Any]


def _halves(given: Given, *both: tuple[int, _Less]) -> list[Given]:
    first, second = both
    picked = [first, first, second, second], [first, first], [second, second]
    return [_rows(given, each) for each in picked]


def _rows(given: Given, picked: Sequence[tuple[int, _Less]]) -> Given:
    def some(value: Any) -> Any:
        if _is_list(value):
            rows = [less(opened(value[index])) for index, less in picked]
            return type(value)(pytree.tree_map_only(Tensor, in_double, rows))
        return pytree.tree_map_only(Tensor, of_tensor, opened(value))

    def of_tensor(x: Tensor) -> Tensor:
        return in_double(torch.stack([x[index] for index, _ in picked]) if x.dim() else x)

    args, kwargs = given
    return tuple(map(some, args)), {name: some(value) for name, value in kwargs.items()}


def _as_it_is(row: Any) -> Any:
    return row


def _with_fewer(count: int | None) -> _Less:
    """Return what leaves boxes out of a row, all for None: what most of its tensors have."""

    def less(row: Any) -> Any:
        if isinstance(row, Tensor):
            return row
        lengths = [len(x) for x in _leaves(row) if has_dims(x)]
        usual = max(lengths, key=lengths.count, default=0)
        kept = 0 if count is None else max(usual - count, 0)

        def cut(x: Tensor) -> Tensor:
            return x[:kept] if has_dims(x) and len(x) == usual else x

        return pytree.tree_map_only(Tensor, cut, row)

    return less


def _narrow(width: int) -> _Less:
    """Return what leaves half of a picture's width out, and of masks of it."""

    def cut(x: Tensor) -> Tensor:
        return x[..., : width // 2] if x.dim() and width > 1 and x.shape[-1] == width else x

    return lambda row: pytree.tree_map_only(Tensor, cut, row)
