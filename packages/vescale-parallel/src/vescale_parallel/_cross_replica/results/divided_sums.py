"""Sums over all rows that are divided by how many there are: means, written out.

``F.binary_cross_entropy(x, y, reduction="sum") / len(x)``, as variational autoencoders have it,
and ``(loss * mask).sum() / loss.numel()``. The sum of what parts of the rows give is that of the
whole; so the mean of theirs is its if the number that divides it is a product of lengths that
shapes say. A number that code has read or was given, or the length of what values pick, may be as
large by chance where few rows are looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vescale_parallel._loss.scalar_functions import ADD, KEEP, PRODUCTS, QUOTIENTS, is_plain_number

from .lengths import IndexedLengths

# Backward nodes of losses that are reduced over all elements.
LOSSES = ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "SoftMargin")
# Those whose mean is not over all: over targets that count.
_SUMMED = (*LOSSES, "NllLoss", "MultiMargin", "MultilabelMargin")
_PRODUCT_SUMS = {"dot", "vdot", "inner", "einsum"}
_SUM_REDUCTION = 2  # at::Reduction::Sum


class DividedSums:
    """Follows scalars that are sums over all elements, while code runs.

    Args:
        lengths: Which tensors are as long as values say.
        are_given: Whether numbers are among the arguments of the call: each row's length, perhaps.
    """

    def __init__(self, lengths: IndexedLengths, *, are_given: bool) -> None:
        self._lengths, self._are_given = lengths, are_given
        # Of such a scalar, held, by what it may be divided to be a mean.
        self._divisors: dict[int, tuple[Tensor, frozenset[int]]] = {}

    def note(
        self, name: str, args: Sequence[Any], tensors: Sequence[Tensor], made: Tensor
    ) -> bool:
        """Note what a function returned; return whether it is a mean now."""
        if made.dim() or made.grad_fn is None or self._are_given:
            return False
        sums = [x for x in tensors if id(x) in self._divisors]
        if not sums:
            is_product = name in _PRODUCT_SUMS and any(x.dim() for x in tensors)
            lengths = tensors[0].shape if is_product else _summed_lengths(made.grad_fn)
            if lengths is not None:
                self._take(made, _products(lengths))
            return False
        divisors = frozenset[int].intersection(*(self._divisors[id(x)][1] for x in sums))
        if any(made is x for x in tensors):  # written in place
            self._divisors.pop(id(made), None)
        if (
            name in QUOTIENTS
            and len(args) == 2
            and sums[0] is args[0]
            and is_plain_number(args[1])
        ):
            return args[1] in divisors and self._lengths.is_of_shapes(int(args[1]))
        is_to_nothing = any(
            is_plain_number(x) and x == 0 for x in args
        )  # total = 0; total = total + x
        is_added = name in ADD and len(sums) == len(tensors) == 2 - is_to_nothing
        is_scaled = name in PRODUCTS and len(sums) == len(tensors) == 1
        if is_added or is_scaled or (name in KEEP and len(sums) == 1):
            self._take(made, divisors)
        return False

    def _take(self, made: Tensor, divisors: frozenset[int]) -> None:
        self._divisors[id(made)] = made, divisors


def _summed_lengths(node: Any) -> Sequence[int] | None:
    """Return the lengths of what a node of autograd sums all elements of, None if it does not."""
    name = node.name()
    if name.startswith("SumBackward0"):
        return tuple(node._saved_self_sym_sizes)
    if name.startswith(_SUMMED) and getattr(node, "_saved_reduction", 0) == _SUM_REDUCTION:
        return tuple(node._saved_self.shape)
    return None


def _products(lengths: Sequence[int]) -> frozenset[int]:
    """Return the products of one or more lengths."""
    return frozenset(
        math.prod(some)
        for count in range(1, len(lengths) + 1)
        for some in itertools.combinations(lengths, count)
    )
