"""Slices of a sequence, one a rank, and what ranks send each other of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import all_gather, all_to_all, named_failures, profiler_range
from vescale_parallel._mesh.transfers import tell_sent
from vescale_parallel._tensor_parallel.communicators import ThreadExchange

Range = tuple[int, int]  # first and behind the last
Method = Literal["all_to_all", "ring"]


def slice_sizes(length: int, num_parts: int) -> list[int]:
    """Return the lengths of consecutive parts that differ by one at most, longer ones first.

    Example:
        >>> slice_sizes(9, 4)
        [3, 2, 2, 2]
    """
    step, longer = divmod(length, num_parts)
    return [step + (part < longer) for part in range(num_parts)]


def sequence_dim(x: Tensor, length: int) -> int | None:
    """Return the dim of a tensor that a block slices, None of what it gets whole, as masks."""
    if str(x.dtype) == "torch.bool" or length not in x.shape:
        return None
    is_integer = not x.is_floating_point() and not x.is_complex()
    match x.dim():
        case 1:
            return 0 if is_integer else None
        case 2 if is_integer:  # positions (B, S)
            return 1 if x.shape[1] == length else None
        case 2:  # rotary tables (S, D)
            return 0 if x.shape[1] != length else None
        case 3:
            return 1 if x.shape[1] == length else None
        case 4 if x.shape[2] != x.shape[3]:
            # (B, heads, S, features), or biases of (1, heads, S, S of another sequence), before
            # (B, S, heads, features): there may be as many heads as positions.
            return next((dim for dim in (2, 1) if x.shape[dim] == length), None)
        case _:
            return None


@dataclass(frozen=True)
class SequenceSlices:
    """Which positions of a sequence each rank has.

    Attributes:
        ranges: Of each rank, in the order in which it holds them. A range is one rank's, or every
            rank's: of two sequences one behind the other, one may be whole on all of them.
    """

    ranges: tuple[tuple[Range, ...], ...]

    @staticmethod
    def over(length: int, size: int, method: Method) -> SequenceSlices:
        """Slice a sequence for a method of attention.

        All-to-all wants consecutive slices. A ring gives each rank one part from the beginning
        and one from the end, see [Note: ring attention].

        Example:
            >>> SequenceSlices.over(9, 2, "ring").ranges
            (((0, 3), (7, 9)), ((3, 5), (5, 7)))
        """
        num_parts = size if method == "all_to_all" else 2 * size
        ends = [0, *itertools.accumulate(slice_sizes(length, num_parts))]
        parts = [*itertools.pairwise(ends)]
        if method == "all_to_all":
            return SequenceSlices(tuple((part,) for part in parts))
        pairs = zip(parts[:size], reversed(parts[size:]), strict=True)
        return SequenceSlices(tuple(pairs))

    @cached_property
    def sizes(self) -> list[int]:
        """How many positions each rank has."""
        return [sum(end - first for first, end in ranges) for ranges in self.ranges]

    @cached_property
    def length(self) -> int:
        """How many positions there are."""
        return max(end for ranges in self.ranges for _, end in ranges)

    @cached_property
    def shared(self) -> list[Range]:
        """The positions that every rank has."""
        found = set[Range].intersection(*map(set[Range], self.ranges))
        return sorted((first, end) for first, end in found if first < end)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank has all of it."""
        return sum(end - first for first, end in self.shared) == self.length

    @cached_property
    def _merged(self) -> list[list[Range]]:
        """The ranges of each rank, as few as there can be of those that are its own."""
        merged = list[list[Range]]()
        for ranges in self.ranges:
            found = list[Range]()
            for each in ranges:
                apart = each in self.shared or (found and found[-1] in self.shared)
                if found and not apart and found[-1][1] == each[0]:
                    found[-1] = found[-1][0], each[1]
                elif each[0] < each[1]:
                    found.append(each)
            merged.append(found)
        return merged

    def is_like(self, other: SequenceSlices) -> bool:
        """Whether ranks have the same positions of two sequences, in the same order."""
        return self is other or self._merged == other._merged

    def apart(self) -> SequenceSlices:
        """Return what ranks have of the positions that are not every rank's, put together.

        Example:
            >>> SequenceSlices((((0, 4), (4, 7)), ((0, 4), (7, 9)))).apart().ranges
            (((0, 3),), ((3, 5),))
        """

        def kept(place: int) -> int:
            return place - sum(end - first for first, end in self.shared if first < place)

        own = ([each for each in ranges if each not in self.shared] for ranges in self.ranges)
        return SequenceSlices(
            tuple(tuple((kept(a), kept(b)) for a, b in ranges) or ((0, 0),) for ranges in own)
        )

    def part(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's slice of a tensor that has the whole sequence along ``dim``."""
        parts = [x.narrow(dim, first, end - first) for first, end in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def narrowed(self, first: int, end: int) -> SequenceSlices:
        """Return what ranks have of the positions from ``first`` until before ``end``.

        Example:
            >>> SequenceSlices.over(6, 2, "all_to_all").narrowed(1, 4).ranges
            (((0, 2),), ((2, 3),))
        """

        def kept(place: int) -> int:
            return min(max(place, first), end) - first

        left = ([(kept(a), kept(b)) for a, b in ranges] for ranges in self.ranges)
        return SequenceSlices(
            tuple(
                tuple(each for each in ranges if each[0] < each[1]) or ((0, 0),) for ranges in left
            )
        )

    def narrow(self, x: Tensor, dim: int, rank: int, first: int, end: int) -> Tensor:
        """Return what a rank's slice has of the positions from ``first`` until before ``end``."""
        found, offset = list[Tensor](), 0
        for a, b in self.ranges[rank]:
            low, high = (min(max(place, first), end) for place in (a, b))
            if low < high or not found:
                at = offset + min(max(low - a, 0), b - a)
                found.append(x.narrow(dim, at, max(high - low, 0)))
            offset += b - a
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return the slices of all ranks, one behind the other, in the order of the sequence."""
        ranges = [each for of_rank in self.ranges for each in of_rank]
        if ranges == sorted(ranges):
            return x
        parts = x.split([end - first for first, end in ranges], dim)
        in_order = sorted(range(len(ranges)), key=lambda at: ranges[at])
        return torch.cat([parts[at] for at in in_order], dim)


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

    def pass_on(self, x: Tensor, numel: int) -> Callable[[], Tensor]:
        """Send a tensor (1D) to the next rank; return what waits for that of the one before."""
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

    def pass_on(self, x: Tensor, numel: int) -> Callable[[], Tensor]:
        received = x.new_empty(numel)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        tell_sent("send slices", x)
        sent = x.numel() * x.element_size()
        with profiler_range("send over cp to rank", after, nbytes=sent), named_failures():
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, group=self._group, group_peer=after),
                    dist.P2POp(dist.irecv, received, group=self._group, group_peer=before),
                ]
            )

        def arrived() -> Tensor:
            with profiler_range("receive over cp from rank", before), named_failures():
                for work in works:
                    work.wait()
            return received

        return arrived


class ContextThreads:
    """One of several ranks that are threads of this process."""

    def __init__(self, threads: ThreadExchange, rank: int) -> None:
        self._threads, self.size, self.rank = threads, threads.size, rank

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        arrived = self._threads.exchange(self.rank, x.split([*sent]))
        return torch.cat([parts[self.rank] for parts in arrived])

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        return torch.cat(self._threads.exchange(self.rank, x), dim)

    def pass_on(self, x: Tensor, numel: int) -> Callable[[], Tensor]:
        received = self._threads.exchange(self.rank, x)[(self.rank - 1) % self.size]
        return lambda: received
