"""What rounding explains: one device, and what it computes from parameters a little off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .placements import best_match
from .record import Record

# What rounding may do, in units of what changes of one epsilon do, and at least, in epsilons of
# the largest element.
_FACTOR, _LEAST = 16.0, 32.0
# Of the largest gradient of a step: below it a gradient is what is left of terms that cancel.
NOTHING = 1e-3


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One device's run, and the same with parameters and outputs that are off by one epsilon.

    Attributes:
        record: Of the run.
        perturbed: Of the others.
        epsilon: Of the coarsest dtype that the model computes in.
        num_shards: Into how many parts, one after the other, the run divided its batches.
        rows_and_tokens: How many of them batches have: sizes of the first dim, and of two.
    """

    record: Record
    perturbed: Sequence[Record]
    epsilon: float
    num_shards: int = 1
    rows_and_tokens: Collection[int] = frozenset()

    def bound(self, one: Tensor, others: Sequence[Tensor], least: float = 0.0) -> float:
        """Return the largest difference that rounding explains."""
        moved = max((distance(one, other) for other in others), default=0.0)
        return max(_FACTOR * moved, _LEAST * self.epsilon * max(largest(one), least))

    def unit(self, one: Tensor) -> float:
        """Return an epsilon of a tensor's largest element."""
        return self.epsilon * (largest(one) or 1.0)


def is_rounding(number: float, of: float, epsilon: float) -> bool:
    """Whether a number is no larger than what rounding may do to another one.

    In half precision that is a quarter of it, which says nothing: no number is then.
    """
    share = _LEAST * epsilon
    return share < NOTHING and number <= share * of


def largest(x: Tensor) -> float:
    """Return the largest finite absolute value of a tensor, 0 if it has none."""
    finite = x.double().nan_to_num(posinf=0.0, neginf=0.0)
    return float(finite.abs().max()) if x.numel() else 0.0


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, infinite if their shapes differ."""
    match = best_match(one, {(0, 0): other}, 0.0)
    return torch.inf if match is None else match.error
