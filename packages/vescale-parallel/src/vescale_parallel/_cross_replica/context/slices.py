"""Slices of a sequence, one a rank, and what ranks send each other of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import all_gather, all_to_all
from vescale_parallel._tensor_parallel.communicators import ThreadExchange


def slice_sizes(length: int, num_parts: int) -> list[int]:
    """Return the lengths of consecutive parts that differ by one at most, longer ones first.

    Example:
        >>> slice_sizes(9, 4)
        [3, 2, 2, 2]
    """
    step, longer = divmod(length, num_parts)
    return [step + (part < longer) for part in range(num_parts)]


class ContextRanks(Protocol):
    """Ranks that share a sequence."""

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send ``sent`` elements of a tensor (1D) to each rank; return what came from each."""
        ...

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Return the slices of all ranks along ``dim``, of these sizes."""
        ...


class ContextProcesses:
    """Ranks that are processes of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return all_to_all(x, self._group, input_splits=[*sent], output_splits=[*received])

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        rows = x.movedim(dim, 0).contiguous()
        whole = all_gather(rows, self._group, sizes=[*sizes])
        return whole.movedim(0, dim).contiguous()


class ContextThreads:
    """One of several ranks that are threads of this process."""

    def __init__(self, threads: ThreadExchange, rank: int) -> None:
        self._threads, self.size, self.rank = threads, threads.size, rank

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        arrived = self._threads.exchange(self.rank, x.split([*sent]))
        return torch.cat([parts[self.rank] for parts in arrived])

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return torch.cat(self._threads.exchange(self.rank, x), dim)
