"""Which of the ranks in this process runs: exactly one does, until it has to wait for others.

[Note: the baton] Every rank is a thread. A rank runs until it waits in a collective or for the
store; then the next rank in cyclic order that can go on does. So the order of everything that
happens is the same each time, and what belongs to the process, such as random generators, can be
exchanged where ranks take turns. If no rank can go on, the program would hang as processes:
a wait that has a timeout ends with it at once, and if none has one that is an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vescale_dtensor._torch_private import forward_derivative_level

from .places import place_in_program

# A rank that asks again and again, while all others wait for it, is given up after that long.
_PATIENCE_SECONDS = 60.0
# How often waits may time out in a row with nothing happening between them but what they cause.
_MAX_TIMEOUTS = 1000


class DeadlockError(RuntimeError):
    """No rank can go on: each waits for another, or for one that has ended."""


class RankStopped(BaseException):
    """Ends a rank because another one failed. Not an Exception: programs must not catch it."""


class _Rank:
    def __init__(self, index: int) -> None:
        self.index = index
        self.wake = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.result: Any = None
        self.has_ended = False
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.timeout: float | None = None
        self.has_timed_out = False
        self.timed_out_at = -1


class Baton:
    """Has ranks run in turn.

    Args:
        size: Number of ranks.
        switch: Called with the rank that has run and the one that runs next; None is the program
            that started the ranks.
    """

    def __init__(self, size: int, switch: Callable[[int | None, int | None], None]) -> None:
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None
        self.current: int | None = None
        self._ranks = [_Rank(index) for index in range(size)]
        self._switch = switch
        self._done = threading.Event()
        self._progress = 0
        self._num_timeouts = 0
        self._pausing_since: float | None = None

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function on every rank, to the end of all of them; return what they returned."""
        for rank in self._ranks:
            rank.thread = threading.Thread(
                target=self._work, args=(rank, function), name=f"rank {rank.index}", daemon=True
            )
            rank.thread.start()
        self._hand_to(self._ranks[0])
        while not self._done.is_set():
            try:
                self._done.wait()
            except KeyboardInterrupt as error:
                # The rank that runs ends when it next waits for others.
                self.failure = self.failure or error
        for rank in self._ranks:
            assert rank.thread is not None
            rank.thread.join()
        if self.failure is not None:
            raise self.failure
        return [rank.result for rank in self._ranks]

    def note_progress(self) -> None:
        """Note that something happened which another rank may wait for."""
        self._progress += 1

    @property
    def is_rank(self) -> bool:
        """Whether the thread that asks is the rank that runs, and not one that it started."""
        running = None if self.current is None else self._ranks[self.current].thread
        return running is threading.current_thread()

    def wait(
        self, ready: Callable[[], bool], waits_for: str, timeout: float | None = None
    ) -> bool:
        """Let other ranks run until ``ready()``.

        Args:
            ready: Whether this rank can go on; without effects.
            waits_for: What it waits for, for an error.
            timeout: Given that, the wait ends when no rank can go on, however soon that is.

        Returns:
            Whether it is ready; otherwise the wait timed out.
        """
        self._stop_if_failed()
        if ready():
            return True
        me = self._this_rank(waits_for)
        if forward_derivative_level() >= 0:
            raise NotImplementedError(
                f"emulated rank {me.index} waits for {waits_for} within a jvp or dual_level, of "
                "which a process has one at a time, and the ranks here would mix up theirs: "
                "start this program with torchrun"
            )
        me.ready, me.waits_for, me.timeout = ready, waits_for, timeout
        me.has_timed_out = False
        self._pass_on(me)
        me.ready = None
        self._stop_if_failed()
        return not me.has_timed_out

    def pause(self, waits_for: str) -> None:
        """Let each other rank run for once that can: this one is about to ask again."""
        me = self._this_rank(waits_for)
        if any(_can_go_on(rank) for rank in self._ranks if rank is not me):
            me.ready, me.waits_for = lambda: True, waits_for
            self._pass_on(me)
            me.ready = None
            self._pausing_since = None
        self._stop_if_failed()
        now = time.monotonic()
        self._pausing_since = self._pausing_since or now
        if now - self._pausing_since > _PATIENCE_SECONDS:
            raise self._deadlock()

    def fail(self, error: BaseException, rank: int | None) -> None:
        """End all ranks with an error, unless there was one before."""
        if self.failure is None:
            self.failure, self.failed_rank = error, rank

    def _this_rank(self, waits_for: str) -> _Rank:
        if not self.is_rank:
            raise RuntimeError(
                f"expected {waits_for} on the thread of an emulated rank, got it on "
                f"{threading.current_thread().name!r}: only the rank that runs communicates, and "
                "it may be waiting for this thread. Communicate from the rank's own thread"
            )
        assert self.current is not None
        return self._ranks[self.current]

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise RankStopped

    def _work(self, rank: _Rank, function: Callable[[int], Any]) -> None:
        rank.wake.acquire()
        try:
            self._stop_if_failed()
            rank.result = function(rank.index)
        except RankStopped:
            pass
        # Handed to whoever started the ranks.
        except BaseException as error:
            self.fail(error, rank.index)
        finally:
            rank.has_ended = True
            self.note_progress()
            following = self._next(rank)
            if following is None:
                self._switch(rank.index, None)
                self.current = None
                self._done.set()
            else:
                self._hand_to(following)

    def _pass_on(self, me: _Rank) -> None:
        following = self._next(me)
        assert following is not None
        if following is not me:
            self._hand_to(following)
            me.wake.acquire()

    def _hand_to(self, rank: _Rank) -> None:
        self._switch(self.current, rank.index)
        self.current = rank.index
        rank.wake.release()

    def _next(self, me: _Rank) -> _Rank | None:
        """Return the rank that runs next; None when all have ended."""
        in_order = self._ranks[me.index + 1 :] + self._ranks[: me.index + 1]
        alive = [rank for rank in in_order if not rank.has_ended]
        if not alive:
            return None
        if self.failure is None:
            for rank in alive:
                if _can_go_on(rank):
                    self._num_timeouts = 0
                    return rank
            timed = [r for r in alive if r.timeout is not None and r.ready is not None]
            fresh = [r for r in timed if r.timed_out_at != self._progress]
            if fresh and self._num_timeouts < _MAX_TIMEOUTS:
                first = min(fresh, key=lambda rank: rank.timeout or 0.0)
                first.has_timed_out, first.timed_out_at = True, self._progress
                self._num_timeouts += 1
                return first
            self.fail(self._deadlock(), None)
        return alive[0]

    def _deadlock(self) -> DeadlockError:
        return DeadlockError(
            "no emulated rank can go on; as processes they would hang:\n" + "\n".join(self.told())
        )

    def told(self) -> Sequence[str]:
        """Return a line for each rank: where it is, and what it waits for."""
        return [_told(rank) for rank in self._ranks]


def _can_go_on(rank: _Rank) -> bool:
    return not rank.has_ended and (rank.ready is None or rank.ready())


def _told(rank: _Rank) -> str:
    if rank.has_ended:
        return f"rank {rank.index} has ended"
    place = place_in_program(rank.thread)
    return f"rank {rank.index} waits for {rank.waits_for}{f', at {place}' if place else ''}"
