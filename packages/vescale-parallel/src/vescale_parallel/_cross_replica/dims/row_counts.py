"""Which dim of a call's tensors the rows may be along, by shapes; a run tells, see call_guard.py.

The rule is [Note: which dim is the batch] in ``_model/inputs.py``; here is what is tried besides.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.copies import tensors_within
from vescale_parallel._model.inputs import children_of, is_shared_by_rows, opened, usual_num_rows
from vescale_parallel._torch_private import pytree

from .find_bounds import bounded_dims
from .packed_rows import PackedRows

# The dim of the rows of leaves of a call, or none, where shapes would mislead; of what is packed,
# how many elements of it each row has.
RowDims = tuple[tuple[int, int | PackedRows | None], ...]

# What is said instead of the dim of a leaf that is in a list of something for every row.
OF_ONE_ROW = -1

# Numbers of rows that are tried where more than one dim may be the rows.
_MOST_GUESSES = 3
# Sets of tensors without rows that are tried where tensors may have none.
_MOST_SETS = 16
# Of a tensor, that are compared between ranks.
_MOST_VALUES = 2**16


def is_one_a_row(
    value: list[Any] | tuple[Any, ...],
    num_rows: int,
    told: Mapping[int, int | PackedRows | None] = MappingProxyType({}),
) -> bool:
    """Whether a list has something for every row, rather than tensors of all rows.

    [Note: lists as long as the batch] Two dicts, each of a tensor for two rows, are two columns of
    a batch (pairs of sentences) or the targets of two pictures with two boxes each. Entries whose
    tensors have rows are taken for columns. If the model does not run on fewer rows then, it is
    run on fewer entries; where both would do and rows depend on each other, it is refused.
    ``told`` says by id that tensors are in such a list of something for every row.
    """
    if len(value) != num_rows or num_rows == 0:
        return False
    direct = [each for each in value if isinstance(each, Tensor)]
    if direct:
        return any(told.get(id(x)) == OF_ONE_ROW for x in direct) or any(
            row_dim(x, num_rows) is None for x in direct
        )
    held = [each for each in map(_tensors_in, value) if each]
    if not held or any(told.get(id(x)) == OF_ONE_ROW for each in held for x in each):
        return True
    return not all(_has_rows(each, num_rows) for each in held)


def _tensors_in(entry: Any) -> list[Tensor]:
    return [*tensors_of_call(opened(entry))]


def _has_rows(tensors: Sequence[Tensor], num_rows: int) -> bool:
    """Whether the tensors of an entry seem to be a column: with rows first, or all along a dim."""
    shaped = [x for x in tensors if x.dim()]
    firsts = any(x.shape[0] == num_rows for x in shaped)
    return firsts or (bool(shaped) and all(num_rows in x.shape for x in shaped))


def row_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Return how many rows a call may have, the likeliest first.

    Most tensors have the rows as their first dim; in (time x batch x features) beside targets
    of (batch) they are what the tensors share. Boxes of pictures, in a list of targets as long as
    the pictures, are no rows, however many tensors share their number.
    """
    usual = usual_num_rows((args, kwargs))
    if usual and any(is_one_a_row(each, usual) for each in _nested_lists(args, kwargs)):
        return [usual]
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


def other_dims(
    unusual: Sequence[RowDims], doubtful: Sequence[int], num_leaves: int
) -> Iterator[RowDims]:
    """Yield where else the rows of a call may be, few leaves and the last ones first.

    [Note: tensors as long as the batch] Class weights, a mask of (time x time), a table of
    positions, prototypes: where they are as long as the batch has rows, shapes take them for rows.
    A run tells: the model does not run on fewer of their "rows". So where it does not, or where
    rows seem to depend on each other, it is run without taking them for rows. Whether they are
    the same on all data-parallel ranks, as what has no rows has to be, ranks tell each other. Of
    (time x batch x features) with as many steps as rows the second dim is tried.
    """
    yield from unusual
    backwards = sorted(doubtful, reverse=True)
    # Most of what is as long as the batch has rows, and what is not used tells nothing.
    sizes = range(1, num_leaves // 2 + 1)
    sets = (each for size in sizes for each in itertools.combinations(backwards, size))
    for each in itertools.islice(sets, _MOST_SETS):
        yield tuple((index, None) for index in each)


def unusual_dims(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, is_known: bool
) -> tuple[RowDims, ...]:
    """Return where rows may be that shapes fit as well, unless it is known where they are."""
    second = () if is_known else second_dims(args, kwargs)
    bounded = bounded_dims(args, kwargs)
    return tuple(filter(None, (*bounded, second, listed_dims(args, kwargs))))


def listed_dims(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowDims:
    """Return leaves of lists taken for columns; see [Note: lists as long as the batch]."""
    counts = likely_row_counts(args, kwargs)
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    indices = {id(x): index for index, x in enumerate(leaves)}
    found: set[int] = set()
    for each in _nested_lists(args, kwargs):
        if len(each) in counts and not is_one_a_row(each, len(each)):
            found |= {indices[id(x)] for x in _tensors_in(each) if id(x) in indices}
    return tuple((index, OF_ONE_ROW) for index in sorted(found))


def _nested_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield the lists of a call whose entries are no tensors and hold some."""
    todo: list[Any] = [*args, *kwargs.values()]
    while todo:
        each = todo.pop()
        todo += children_of(opened(each))
        is_list = type(each) in (list, tuple)
        if is_list and not any(isinstance(x, Tensor) for x in each) and _tensors_in(each):
            yield each


def is_of_list(dims: RowDims) -> bool:
    """Whether tensors are said to be in a list of something for every row."""
    return any(dim == OF_ONE_ROW for _, dim in dims)


def second_dims(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowDims:
    """Return the second dim of tensors whose first two are both as long as the batch."""
    counts = likely_row_counts(args, kwargs)
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return tuple(
        (index, 1)
        for index, x in enumerate(leaves)
        if isinstance(x, Tensor)
        # (batch x features) has no steps.
        and x.dim() > (2 if x.is_floating_point() else 1)
        and x.shape[0] == x.shape[1]
        and x.shape[0] in counts
    )


@dataclass(frozen=True)
class ValuesOfRows:
    """The values of a tensor that is taken for rows.

    Attributes:
        index: Of the leaf.
        is_telling: Whether it is not by chance if ranks have the same, as few labels are.
        digest: Of the first values.
    """

    index: int
    is_telling: bool
    digest: bytes


def values_of_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[ValuesOfRows]:
    """Return the values of what is as long as one of the numbers of rows to try."""
    counts = likely_row_counts(args, kwargs)
    found: set[ValuesOfRows] = set()
    for index, x in enumerate(pytree.tree_leaves((tuple(args), dict(kwargs)))):
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            continue
        if x.device.type == "meta" or not any(count in x.shape for count in counts):
            continue
        values = x.detach().flatten()[:_MOST_VALUES].cpu().contiguous()  # of one column
        is_telling = x.is_floating_point() and bool((values != values[:1]).any())
        whole = repr(tuple(x.shape)).encode() + values.view(torch.uint8).numpy().tobytes()
        found.add(ValuesOfRows(index, is_telling, hashlib.sha256(whole).digest()))
    return frozenset(found)


def num_nodes_of(tree: Any) -> int | None:
    """Return how many nodes the graphs of a call have, None if it is called with none."""
    return next(iter(node_counts([*tensors_of_call(tree)])), None)


def tensors_of_call(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a call, those in objects that pytree does not open too, each once."""
    leaves = itertools.chain.from_iterable(map(tensors_within, pytree.tree_leaves(tree)))
    return iter({id(x): x for x in leaves}.values())


def node_counts(tensors: Sequence[Tensor]) -> list[int]:
    """Return how many nodes there may be, the likely number first."""
    edges = [x for x in tensors if is_edges(x)]
    if not edges:
        return []
    last = max(map(last_end, edges))
    firsts = {len(x) for x in tensors if x.dim() and not is_edges(x)}
    counts = [n for n in firsts if n > max(last, 2)]
    of_edges = {x.shape[1] for x in edges}
    return sorted(counts, key=lambda n: (n in of_edges, n))[:_MOST_GUESSES]


def is_edges(x: Tensor) -> bool:
    is_pair = x.dim() == 2 and x.shape[0] == 2 and x.dtype in (torch.int64, torch.int32)
    return is_pair and x.device.type != "meta" and (not x.numel() or int(x.min()) >= 0)


def last_end(edges: Tensor) -> int:
    return int(edges.max()) if edges.numel() else 0
