"""Sums in a tree: on one rank, and over ranks that have a branch each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import all_gather, all_to_all
from vescale_parallel._tensor_parallel.communicators import ProcessRanks, own_part

_HALF = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what chunks of a dtype are added in: float32 for half precision."""
    return torch.float32 if dtype in _HALF else dtype


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Add neighbours, then neighbouring sums; their number is a power of two.

    The result is in the dtype of accumulation, and no memory of a term's.
    """
    wide = accumulation_dtype(terms[0].dtype)
    if len(terms) == 1:
        return terms[0].to(wide, copy=True)
    sums = [
        first.to(wide) + second.to(wide)
        for first, second in zip(terms[::2], terms[1::2], strict=True)
    ]
    while len(sums) > 1:
        sums = [first.add_(second) for first, second in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


class TreeRanks(ProcessRanks):
    """Ranks that are processes, and add up what they have in a tree."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._of = group

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 2:
            return super().all_reduce(x)  # one sum has one order
        numel = x.numel()
        row = -(-numel // self.size)
        rows = x.new_zeros(self.size, row)
        rows.view(-1)[:numel] = x.reshape(-1)
        parts = all_gather(self._added(rows), self._of)
        return parts.view(-1)[:numel].view(x.shape)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        if x.shape[dim] % self.size:  # an evaluation
            return own_part(self.all_reduce(x), dim, self)
        return self._added(torch.stack(x.chunk(self.size, dim)))

    def _added(self, rows: Tensor) -> Tensor:
        return tree_sum(all_to_all(rows, self._of).unbind()).to(rows.dtype)


class OneRank:
    """One rank that has all chunks."""

    size, rank = 1, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x
