"""Whether the passes that train counted the targets that were counted before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SeenCounts:
    """Compares what the micro-batches of a step count with what was counted before.

    ``is_delayed`` has a step look at the comparison of the one before it, which has arrived from
    the device by then; ``otherwise`` is what else errors advise.
    """

    def __init__(self, *, is_delayed: bool, otherwise: str) -> None:
        self._is_delayed, self._otherwise = is_delayed, otherwise
        self._expected: list[Tensor] = []
        self._seen: list[Tensor] = []
        self._before: tuple[Tensor, Tensor] | None = None

    def expect(self, counts: Sequence[Tensor]) -> None:
        """Begin a step, with what its micro-batches count together."""
        self._expected, self._seen = [*counts], []

    def add(self, index: int, counted: Tensor) -> None:
        """Add what mean number ``index`` of a micro-batch counts."""
        if index < len(self._seen):
            self._seen[index] = self._seen[index] + counted
        else:
            self._seen.append(counted)

    def check(self) -> None:
        """End a step.

        Raises:
            ValueError: If the step counted something else; or the one before it, if delayed.
        """
        expected, self._expected = self._expected, []
        seen, self._seen = self._seen, []
        if self._before is not None:
            _compare(*self._before, self._otherwise)
            self._before = None
        if not expected:
            return
        if len(expected) != len(seen):
            raise ValueError(
                f"forward computed {len(seen)} means over targets, and {len(expected)} when its "
                f"targets were counted; compute them unconditionally, or use "
                f"{self._otherwise}"
            )
        pair = (torch.stack(expected), torch.stack(seen))
        if self._is_delayed:
            self._before = pair
        else:
            _compare(*pair, self._otherwise)


def _compare(expected: Tensor, seen: Tensor, otherwise: str) -> None:
    if not torch.equal(expected, seen):
        raise ValueError(
            "forward counted other targets of its loss than were counted before the step: "
            f"expected {expected.tolist()}, got {seen.tolist()}. Targets must follow from the "
            "tensors of the batch, and not from random numbers, results of modules or what a "
            f"module counts in Python; make them before the model is called, or use "
            f"{otherwise}"
        )
