"""How far the clocks of ranks are apart, from pings.

A rank notes its time, asks rank 0 for its, and notes the time of the answer: rank 0 answered
between the two, so half way is off by at most half of the way there and back. The quickest of
several pings is taken. (Cristian, Probabilistic clock synchronization, 1989.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vescale_dtensor import named_failures

_NUM_PINGS = 8


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What this rank's clock shows, beside rank 0's.

    Attributes:
        at: This rank's time, in nanoseconds.
        offset: What this rank's clock is ahead of rank 0's, in nanoseconds.
        error: What ``offset`` may be off at most.
    """

    at: int
    offset: int
    error: int


def read_clocks(clock: Callable[[], int]) -> ClockReading:
    """Compare this rank's clock with rank 0's. Every rank must call this."""
    if not _has_others():
        return ClockReading(clock(), 0, 0)
    rank = dist.get_rank()
    with named_failures():
        if rank == 0:
            for other in range(1, dist.get_world_size()):
                for _ in range(_NUM_PINGS):
                    _answer(other, clock)
            return ClockReading(clock(), 0, 0)
        return min((_ping(clock) for _ in range(_NUM_PINGS)), key=lambda each: each.error)


def _has_others() -> bool:
    # What a fake group "receives" is no time.
    is_real = dist.is_initialized() and dist.get_backend() != "fake"
    return is_real and dist.get_world_size() > 1


def _answer(rank: int, clock: Callable[[], int]) -> None:
    message = _message(0)
    dist.recv(message, rank)
    dist.send(_message(clock()), rank)


def _ping(clock: Callable[[], int]) -> ClockReading:
    answer, before = _message(0), clock()
    dist.send(_message(0), 0)
    dist.recv(answer, 0)
    there = int(answer.item())
    after = clock()
    # Rounded up: times are whole numbers.
    error = (after - before + 1) // 2
    return ClockReading(after, (before + after) // 2 - there, error)


def _message(value: int) -> torch.Tensor:
    on_host = "gloo" in dist.get_backend_config()
    return torch.tensor(value, dtype=torch.int64, device="cpu" if on_host else "cuda")


def to_rank_0(first: ClockReading, last: ClockReading) -> Callable[[int], int]:
    """Return what turns this rank's times into rank 0's; clocks drift evenly in between."""
    span = last.at - first.at
    drift = (last.offset - first.offset) / span if span > 0 else 0.0

    def shift(at: int) -> int:
        return at - first.offset - round(drift * (at - first.at))

    return shift
