"""Makes a batch of samples, and tells whether it puts the rows of one sample apart.

[Note: rows of a sample apart] A collate function may make several rows of a sample: a chosen and a
rejected answer, two views of an image. If it puts all first ones before all second ones, the rows
of two ranks, one behind the other, are in another order than those of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import set_generators, states_of_generators


@dataclass
class Collate:
    """Makes a batch, in a worker perhaps, so it has to be picklable."""

    collate_fn: Callable[[list[Any]], Any]
    # What a function does with rows of a sample it does always: it is tried once.
    _puts_apart: bool | None = None

    def __call__(self, samples: list[Any]) -> tuple[bool, Any]:
        """Return whether rows of a sample are apart, and the batch."""
        batch = self.collate_fn(samples)
        count = len(samples)
        has_more = any(len(x) > count > 0 == len(x) % count for x in _tensors(batch))
        if has_more and self._puts_apart is None:
            self._puts_apart = self._tried(samples[0])
        return has_more and bool(self._puts_apart), batch

    def _tried(self, sample: Any) -> bool:
        before = states_of_generators()
        try:
            once, twice = (self.collate_fn([sample] * count) for count in (1, 2))
        except Exception:  # it is not made for so few
            return False
        finally:
            set_generators(before)
        return any(
            x.shape == (2 * len(y), *y.shape[1:])
            and torch.equal(x, y.repeat_interleave(2, 0))
            and not torch.equal(x, torch.cat([y, y]))
            for x, y in zip(_tensors(twice), _tensors(once), strict=False)
        )


def _tensors(batch: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
