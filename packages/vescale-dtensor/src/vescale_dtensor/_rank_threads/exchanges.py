"""Where ranks of one process exchange tensors: collectives, and messages from rank to rank."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._torch_private import WorkBase

from .baton import Baton, RankStopped
from .store import ThreadStore

# Gets what each rank brought, in the order of group ranks.
Run = Callable[[Sequence[Any]], None]


class Meeting:
    """One collective, or one message: done when everyone has come.

    Attributes:
        name: What it is, for errors.
        is_done: Whether the tensors were exchanged.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self._size = name, size
        self.is_done = False
        self.source = -1
        self._brought: dict[int, Any] = {}
        self._events: list[Any] = []
        self._done_event: Any = None

    def come(self, rank: int, brought: Any, exchange: Run) -> bool:
        """Bring tensors; whoever comes last exchanges them. Whether that has happened."""
        self._brought[rank] = brought
        _record(self._events)
        if len(self._brought) < self._size:
            return False
        for event in self._events:
            event.wait()
        with torch.no_grad():
            exchange([self._brought[place] for place in sorted(self._brought)])
        made: list[Any] = []
        _record(made)
        self._done_event = made[0] if made else None
        self._brought.clear()
        self._events.clear()
        self.is_done = True
        return True

    def follow(self) -> None:
        """Have the current stream wait for what the exchange was asked to do."""
        if self._done_event is not None:
            self._done_event.wait()


def _record(events: list[Any]) -> None:
    """Add where the current stream of the device is, if there is one."""
    if torch.cuda.is_initialized():
        event = torch.cuda.Event()
        event.record()
        events.append(event)


class ThreadWork(WorkBase):
    """A collective that was started; waiting for it lets the other ranks run."""

    def __init__(self, meeting: Meeting, baton: Baton, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._meeting, self._baton, self._result = meeting, baton, list(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the tensors were exchanged.

        Raises:
            RuntimeError: When a timeout was given, and no rank can go on.
        """
        meeting, limit = self._meeting, timeout.total_seconds() if timeout else None
        if not self._baton.wait(lambda: meeting.is_done, meeting.name, limit or None):
            raise RuntimeError(f"timed out after {timeout} waiting for {meeting.name}")
        meeting.follow()
        return True

    def is_completed(self) -> bool:
        """Whether the tensors were exchanged; whoever asks in vain lets the other ranks run."""
        if not self._meeting.is_done and self._baton.is_rank:
            self._baton.pause(self._meeting.name)
        return self._meeting.is_done

    def is_success(self) -> bool:
        """Whether the tensors were exchanged."""
        return self._meeting.is_done

    def synchronize(self) -> None:
        """Return when the tensors were exchanged."""
        self.wait()

    def block_current_stream(self) -> None:
        """Return when the tensors were exchanged."""
        self.wait()

    def exception(self) -> None:
        """Return nothing: what goes wrong ends all ranks."""

    def result(self) -> list[Tensor]:
        """Return what was written."""
        return self._result

    def get_future(self) -> Any:
        """Return a future of what was written, when it is there."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future

    def source_rank(self) -> int:
        """Return the rank of the group that sent what was received."""
        return self._meeting.source

    _source_rank = source_rank


class Exchanges:
    """The collectives and messages of all groups of an emulation."""

    def __init__(self, baton: Baton, store: ThreadStore) -> None:
        self.baton, self.store = baton, store
        self._open: dict[Hashable, Meeting] = {}
        self._sends: dict[Hashable, deque[tuple[Meeting, Tensor]]] = defaultdict(deque)
        self._receives: dict[Hashable, deque[tuple[Meeting, Tensor]]] = defaultdict(deque)

    def come(
        self, key: Hashable, name: str, size: int, rank: int, brought: Any, exchange: Run
    ) -> Meeting:
        """Bring tensors to the collective that ranks of a group know by ``key``."""
        self._check_thread(name)
        meeting = self._open.setdefault(key, Meeting(name, size))
        if meeting.name != name:
            raise RuntimeError(
                f"ranks came to different collectives of one group: {meeting.name} on one rank, "
                f"and {name} on group rank {rank}. Every rank of a group has to call its "
                "collectives in one order, with tensors of one shape and dtype"
            )
        if meeting.come(rank, brought, exchange):
            del self._open[key]
            self.baton.note_progress()
        return meeting

    def send(self, group: Hashable, name: str, lane: tuple[int, int, int], x: Tensor) -> Meeting:
        """Send a tensor along (source, target, tag)."""
        self._check_thread(name)
        source, target, tag = lane
        for key in ((group, *lane), (group, -1, target, tag)):
            if waiting := self._receives.get(key):
                meeting, into = waiting.popleft()
                self._hand_over(meeting, x, into, source)
                return meeting
        meeting = Meeting(name, 2)
        meeting.come(0, x, _nothing)
        self._sends[(group, *lane)].append((meeting, x))
        return meeting

    def receive(
        self, group: Hashable, name: str, lane: tuple[int, int, int], into: Tensor, size: int
    ) -> Meeting:
        """Receive a tensor along (source, target, tag); source -1 is any rank of the group."""
        self._check_thread(name)
        source, target, tag = lane
        for place in range(size) if source < 0 else (source,):
            if waiting := self._sends.get((group, place, target, tag)):
                meeting, x = waiting.popleft()
                self._hand_over(meeting, x, into, place)
                return meeting
        meeting = Meeting(name, 2)
        meeting.come(0, into, _nothing)
        self._receives[(group, *lane)].append((meeting, into))
        return meeting

    def _hand_over(self, meeting: Meeting, x: Tensor, into: Tensor, source: int) -> None:
        if x.numel() * x.itemsize != into.numel() * into.itemsize:
            raise RuntimeError(
                f"{meeting.name}: {tuple(x.shape)} of {x.dtype} is sent, and "
                f"{tuple(into.shape)} of {into.dtype} is to be received"
            )
        meeting.source = source
        meeting.come(1, None, lambda _: write(into, x))
        self.baton.note_progress()

    def _check_thread(self, name: str) -> None:
        if self.baton.failure is not None:
            raise RankStopped
        if not self.baton.is_rank:
            raise RuntimeError(
                f"expected {name} on the thread of an emulated rank, got it on a thread that a "
                "rank started: the rank may be waiting for it, and the other ranks for the rank. "
                "Communicate from the rank's own thread"
            )


def _nothing(_: Sequence[Any]) -> None:
    """Exchange nothing."""


def write(out: Tensor, value: Tensor) -> None:
    """Write the elements of one tensor into another, behind autograd's back as processes do."""
    into = out.detach()
    if into.shape == value.shape and into.dtype == value.dtype:
        into.copy_(value)
    else:
        flat = value.detach().contiguous().view(-1)
        into.copy_((flat if flat.dtype == into.dtype else flat.view(into.dtype)).view(into.shape))
