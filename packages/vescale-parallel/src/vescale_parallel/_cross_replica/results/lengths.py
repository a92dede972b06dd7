"""Which results of indexing are as long as shapes say, and not as there are elements of a value.

A mean over ``x[mask]`` divides by a number that other rows have otherwise; one over ``x[:, i, j]``
of a table of pairs, or over ``x[torch.arange(len(x)), last]``, does not. Rows that are picked by
numbers of the call, ``x[row]`` for the row of each box, may be more on some ranks than on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree

_BY_VALUES = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}
_INDEXED = {"__getitem__", "index_select"}
_JOINED = {"cat", "concat", "concatenate", "hstack", "vstack", "dstack"}
# After these, Python may make indices, and numbers of them, of what it has read.
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__index__", "__float__"}
_MASKS = (torch.bool, torch.uint8)


class IndexedLengths:
    """Follows tensors that are as long as values say, while code runs.

    Args:
        has_no_rows: Whether a tensor is made of parameters and buffers alone.

    Attributes:
        has_read: Whether code has read a value, by which Python may choose.
    """

    def __init__(self, has_no_rows: Callable[[Tensor], bool] = lambda tensor: False) -> None:
        self._has_no_rows = has_no_rows
        self._by_values: dict[int, Tensor] = {}  # held, so that no other tensor gets the number
        self._by_shape = set[Any]()
        self._made: dict[int, Tensor] = {}  # of nothing, as torch.arange does
        self.has_read = False

    def note(self, name: str, args: Sequence[Any], tensors: Sequence[Tensor], result: Any) -> None:
        """Note what a function returned for arguments, and for the tensors among all it got."""
        self.has_read |= name in _READS
        if name in _INDEXED:
            # Keywords of index_select are not looked at.
            is_told = len(args) == (3 if name == "index_select" else 2)
            is_known = is_told and self._is_known(args[0])
            is_known = is_known and self._says_length(args[0], args[1:])
            if is_known and isinstance(result, Tensor) and result.grad_fn is not None:
                self._by_shape.add(result.grad_fn)
        elif name in _BY_VALUES or (name == "where" and len(tensors) == 1):
            is_known = False
        elif name == "repeat_interleave":
            is_known = len(tensors) == 1 and len(args) > 1 and self._is_known(tensors[0])
        else:
            is_known = self._is_kept(name, tensors, result)
            if not tensors and isinstance(result, Tensor):
                self._made[id(result)] = result
        for made in () if is_known else pytree.tree_leaves(result):
            if isinstance(made, Tensor) and made.dim():
                self._by_values[id(made)] = made

    def is_by_shape(self, node: Any) -> bool:
        """Whether a node of autograd is of indexing whose result is as long as shapes say."""
        return node in self._by_shape

    def is_of_shapes(self, number: int) -> bool:
        """Whether no number that was read, nor the length of what values pick, may be in this."""
        lengths = {length for x in self._by_values.values() for length in x.shape}
        return not self.has_read and all(length < 2 or number % length for length in lengths)

    @property
    def has_picked(self) -> bool:
        """Whether some tensor is as long as values say."""
        return bool(self._by_values)

    def _is_known(self, tensor: Any) -> bool:
        return id(tensor) not in self._by_values

    def _is_kept(self, name: str, tensors: Sequence[Tensor], result: Any) -> bool:
        """Whether what a function returned is as long as what it was given, which shapes say."""
        if all(map(self._is_known, tensors)):
            return bool(tensors) or not self.has_read
        # What values say was as long, then, or one for all.
        whole = [x.shape for x in tensors if self._is_known(x) and x.numel() > 1]
        return name not in _JOINED and isinstance(result, Tensor) and result.shape in whole

    def _says_length(self, indexed: Tensor, index: Sequence[Any]) -> bool:
        """Whether an index picks as many elements as shapes say: then one tensor in it does."""
        num_dims = indexed.dim()
        if len(index) == 2:  # of index_select
            parts: Sequence[Any] = [*[slice(None)] * (index[0] % num_dims), index[1]]
        else:
            parts = index[0] if isinstance(index[0], tuple) else index
        keeps_rows = self._has_no_rows(indexed) or self._keeps_rows(num_dims, parts)
        if not all(map(_is_index, parts)) or not keeps_rows:
            return False
        chosen = [x for x in parts if isinstance(x, Tensor)]
        known = [x for x in chosen if self._is_known(x)]
        longest = max((x.numel() for x in chosen), default=1)
        return len(known) == len(chosen) or any(1 < x.numel() == longest for x in known)

    def _keeps_rows(self, num_dims: int, parts: Sequence[Any]) -> bool:
        """Whether the first dim, which may be rows, is indexed by nothing that a call says."""
        parts = [x for x in parts if x is not None]
        if len(parts) > num_dims and isinstance(parts[0], EllipsisType):
            parts = parts[1:]
        first = parts[0] if parts else None
        return not isinstance(first, Tensor) or id(first) in self._made


def _is_index(value: Any) -> bool:
    """Whether a part of an index picks no elements by their values; Python may make lists so."""
    if isinstance(value, Tensor):
        return value.dtype not in _MASKS
    return value is None or isinstance(value, int | slice | EllipsisType)
