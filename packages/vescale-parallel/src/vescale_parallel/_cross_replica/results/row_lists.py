"""Lists and tuples in results that have elements of every row, as many as there are rows.

Vision-language models of transformers return the features of each image so. Ranks and
micro-batches return lists of their rows, which one after the other are the list of the batch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vescale_parallel._cross_replica.borders import ListOfRows, Output
from vescale_parallel._cross_replica.parts import equal
from vescale_parallel._loss.not_returned import NotReturned
from vescale_parallel._torch_private import pytree


@dataclass(frozen=True, eq=False)
class RowList:
    """A list of tensors, or of what stands for them, in a structure of which it is one leaf.

    Attributes:
        elements: What it holds.
        kind: A list or a tuple.
        start: Which element of the list of all rows its first one is.
        total: How many elements the list of all rows has.
    """

    elements: tuple[Tensor | NotReturned, ...]
    kind: type[list[Any]] | type[tuple[Any, ...]]
    start: int = 0
    total: int = 0


def folded_alike(whole: Any, parts: Sequence[Any]) -> list[Any]:
    """Return what all rows and parts of them gave, with lists of rows as leaves.

    Lists are such where those of parts make up that of all. Nothing is returned if there are none.
    """
    leaves, spec = _flattened(whole)
    of_parts = [_flattened(part)[0] for part in parts]
    if any(len(each) != len(leaves) for each in of_parts):
        return []
    found = [
        index
        for index, leaf in enumerate(leaves)
        if _is_list(leaf) and _is_made_up(leaf, [each[index] for each in of_parts])
    ]
    if not found:
        return []
    made, starts = list[Any](), dict.fromkeys(found, 0)
    for tree in (whole, *parts):
        leaves, spec = _flattened(tree)
        for index in found:
            total = sum(len(each[index]) for each in of_parts)
            held = leaves[index]
            leaves[index] = RowList(tuple(held), type(held), starts[index], total)
            starts[index] += 0 if tree is whole else len(held)
        made.append(pytree.tree_unflatten(leaves, spec))
    return made


def with_lists(found: Sequence[Output], outputs: Sequence[Any]) -> tuple[Output, ...]:
    """Return where the rows are in outputs, given where they are in those that are tensors."""
    pairs = zip(found, outputs, strict=False)
    return tuple(ListOfRows() if isinstance(x, RowList) else at for at, x in pairs)


def folded(tree: Any, names: Container[str]) -> Any:
    """Return a structure in which lists of these names, by ``leaf_names`` of it, are leaves."""
    leaves, spec = _flattened(tree)
    try:
        pairs, _ = pytree.tree_flatten_with_path(tree, is_leaf=_is_list)
        paths = [pytree.keystr(path) for path, _ in pairs]
    except ValueError:  # a class that does not say how its parts are called
        paths = []
    count = 0
    for index, leaf in enumerate(leaves):
        name = paths[index] if paths else f"leaf {count}"
        if _is_list(leaf) and name in names:
            leaves[index] = RowList(tuple(leaf), type(leaf))
        count += len(leaf) if _is_list(leaves[index]) else 1
    return pytree.tree_unflatten(leaves, spec)


def expanded(outputs: Sequence[Any]) -> list[Any]:
    """Return leaves with the elements of lists in their places among those of all rows."""
    found: list[Any] = []
    for leaf in outputs:
        if isinstance(leaf, RowList):
            behind = leaf.total - leaf.start - len(leaf.elements)
            found += [None] * leaf.start + [*leaf.elements] + [None] * behind
        else:
            found.append(leaf)
    return found


def in_lists(outputs: Sequence[Any]) -> list[bool]:
    """Return of :func:`expanded` leaves whether they are in lists."""
    counts = [(x.total, True) if isinstance(x, RowList) else (1, False) for x in outputs]
    return [is_in for count, is_in in counts for _ in range(count)]


def _flattened(tree: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(tree, is_leaf=_is_list)


def _is_list(leaf: Any) -> bool:
    kinds = Tensor | NotReturned
    return type(leaf) in (list, tuple) and bool(leaf) and all(isinstance(x, kinds) for x in leaf)


def _is_made_up(whole: Sequence[Tensor], parts: Sequence[Any]) -> bool:
    if not all(map(_is_list, parts)) or all(len(part) == len(whole) for part in parts):
        return False
    made = [x for part in parts for x in part]
    return len(made) == len(whole) and all(map(equal, made, whole))
