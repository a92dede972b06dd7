"""Which results of indexing are as long as shapes say, and not as there are elements of a value.

A mean over ``x[mask]`` divides by a number that other rows have otherwise; one over ``x[:, i, j]``
of a table of pairs, or over ``x[torch.arange(len(x)), last]``, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree

_BY_VALUES = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"}
_INDEXED = {"__getitem__", "index_select"}
# After these, Python may make indices, and numbers of them, of what it has read.
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__index__", "__float__"}
_MASKS = (torch.bool, torch.uint8)


class IndexedLengths:
    """Follows tensors that are as long as values say, while code runs."""

    def __init__(self) -> None:
        self._by_values: dict[int, Tensor] = {}  # held, so that no other tensor gets the number
        self._by_shape = set[Any]()
        self._has_read = False

    def note(self, name: str, args: Sequence[Any], tensors: Sequence[Tensor], result: Any) -> None:
        """Note what a function returned for arguments, and for the tensors among all it got."""
        self._has_read |= name in _READS
        is_known = not any(id(x) in self._by_values for x in tensors)
        is_known &= bool(tensors) or not self._has_read
        if name in _BY_VALUES or (name == "where" and len(tensors) == 1):
            is_known = False
        if name in _INDEXED:
            is_known &= all(map(_is_index, args[1:]))
            if is_known and isinstance(result, Tensor) and result.grad_fn is not None:
                self._by_shape.add(result.grad_fn)
        if not is_known:
            for made in pytree.tree_leaves(result):
                if isinstance(made, Tensor) and made.dim():
                    self._by_values[id(made)] = made

    def is_by_shape(self, node: Any) -> bool:
        """Whether a node of autograd is of indexing whose result is as long as shapes say."""
        return node in self._by_shape


def _is_index(value: Any) -> bool:
    """Whether an index picks no elements by their values; Python may have made a list by these."""
    if isinstance(value, tuple):
        return all(map(_is_index, value))
    if isinstance(value, Tensor):
        return value.dtype not in _MASKS
    return value is None or isinstance(value, int | slice | EllipsisType)
