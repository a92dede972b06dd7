"""The tensor-parallel ranks of one layer, and what they send each other."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import all_gather, all_reduce, reduce_scatter

from .chunks import part_sizes

T = TypeVar("T")


class Ranks(Protocol):
    """Ranks that share a layer. Shards of a dim are those of ``torch.chunk``, in rank order."""

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks."""
        ...

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        """Return the shards of all ranks along ``dim``, which is ``length`` long together."""
        ...

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard along ``dim`` of the sum over ranks."""
        ...


def own_part(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have whole."""
    sizes = part_sizes(x.shape[dim], ranks.size)
    return x.narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank]).contiguous()


def _is_outermost(x: Tensor, dim: int) -> bool:
    """Whether parts along ``dim`` are parts of memory: it is the first dim that is not 1."""
    return math.prod(x.shape[:dim]) == 1


class ProcessRanks:
    """Ranks that are processes of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        return all_reduce(x, self._group)

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        if length % self.size == 0:
            parts = all_gather(x, self._group)
            if _is_outermost(x, dim):
                return parts.view(*x.shape[:dim], length, *x.shape[dim:][1:])
            return torch.cat(parts.unbind(), dim)
        rows = x.movedim(dim, 0).contiguous()
        sizes = part_sizes(length, self.size)
        return all_gather(rows, self._group, sizes=sizes).movedim(0, dim).contiguous()

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        length = x.shape[dim]
        if length % self.size == 0:
            if _is_outermost(x, dim):
                part = (*x.shape[:dim], length // self.size, *x.shape[dim:][1:])
                return reduce_scatter(x.reshape(self.size, *part), self._group)
            return reduce_scatter(torch.stack(x.chunk(self.size, dim)), self._group)
        rows = x.movedim(dim, 0).contiguous()
        own = reduce_scatter(rows, self._group, sizes=part_sizes(length, self.size))
        return own.movedim(0, dim).contiguous()


class FakeRanks:
    """The first of several ranks, alone: collectives give the right shape and no values."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.contiguous().clone()

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = length
        return x.new_empty(shape)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return own_part(x, dim, self)


class ThreadRanks:
    """One of several ranks that are threads of this process."""

    def __init__(self, threads: ThreadExchange, rank: int) -> None:
        self._threads, self.size, self.rank = threads, threads.size, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return functools.reduce(operator.add, self._threads.exchange(self.rank, x))

    def all_gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        return torch.cat(self._threads.exchange(self.rank, x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return own_part(self.all_reduce(x), dim, self)


class Turns(Protocol):
    """Lets one thread run at a time."""

    def passed_on(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Let the others run inside."""
        ...


class ThreadExchange:
    """Where threads exchange tensors; only one of them runs at a time, between exchanges."""

    # A rank that sends less than the others would have them wait for ever.
    _TIMEOUT_SECONDS = 60

    def __init__(self, size: int, turns: Turns) -> None:
        self.size, self.turns = size, turns
        self._barrier = threading.Barrier(size, timeout=self._TIMEOUT_SECONDS)
        self._given: list[Any] = [None] * size

    def exchange(self, rank: int, x: T) -> list[T]:
        """Return what all ranks gave, in rank order."""
        self._given[rank] = x
        with self.turns.passed_on(rank):
            self._barrier.wait()
            found = [each for each in self._given if each is not None]
            self._barrier.wait()
        return found

    def give_up(self) -> None:
        """Have the others raise, too."""
        self._barrier.abort()
