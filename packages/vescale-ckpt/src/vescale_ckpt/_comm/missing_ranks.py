"""Missing ranks: who has not come to a collective, for the error when it does not end.

[Note: arrivals]
gloo says that it has waited in vain, not for whom. So a rank that has waited for long notes in the
store of the process group how many collectives it has come to, and when one of them fails, ranks
look up who has noted less: those died or hang. The store is asked only when something takes long
or has failed; as long as all goes well nothing is sent. It is asked from threads: the process that
serves it may be what hangs, which must not keep a rank from its error.

The store also holds the error of the first rank that could not go on; see [Note: told errors].
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from vescale_ckpt._torch_private import Store

_POLL_SECONDS = 0.05
_FAILURE = "failure"
_ALL = 1 << 62

T = TypeVar("T")


class Arrivals:
    """What the ranks of one group have noted.

    All of them see the store, and nobody else writes to it.

    Attributes:
        has_given_up: Whether a collective has failed on this rank, which comes to no other then.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._count = 0
        self._noted = 0
        self.has_given_up = False

    def begin(self) -> None:
        """Count one more collective."""
        self._count += 1

    def note(self) -> None:
        """Let the others know that this rank has come to the collective; does not wait."""
        self._note(self._count)

    def tell(self, failure: str, patience: timedelta) -> None:
        """Give up and let the others know why, unless another rank was first."""
        self.has_given_up = True
        self._asked(lambda: self._store.compare_set(_FAILURE, "", failure), patience)

    def told(self, patience: timedelta) -> str | None:
        """Return what a rank has told all others, None if there is nothing, or no finding out."""

        def ask() -> str | None:
            return self._store.get(_FAILURE).decode() if self._store.check([_FAILURE]) else None

        return self._asked(ask, patience)

    def _asked(self, ask: Callable[[], T], patience: timedelta) -> T | None:
        answers: list[T] = []

        def run() -> None:
            with suppress(RuntimeError):
                answers.append(ask())

        asking = threading.Thread(target=run, daemon=True)
        if _is_started(asking):
            asking.join(2 * patience.total_seconds() + 1)
        return answers[0] if answers else None

    def missing(self, patience: timedelta) -> list[int] | None:
        """Give up and return the ranks that have not come, None if there is no finding out."""
        self.has_given_up = True
        # Whoever waits for this rank from now on does so because of those that are missing here.
        self._note(_ALL)
        absent = [rank for rank in range(self._size) if rank != self._rank]

        def ask() -> list[int]:
            deadline = time.monotonic() + patience.total_seconds()
            while True:
                absent[:] = [rank for rank in absent if not self._has_come(rank)]
                if not absent or time.monotonic() > deadline:
                    return absent
                time.sleep(_POLL_SECONDS)

        return self._asked(ask, patience)

    def _note(self, count: int) -> None:
        if self._noted < count:
            self._noted = count
            if not _is_started(threading.Thread(target=self._write, args=(count,), daemon=True)):
                self._write(count)  # a store answers only to who reads

    def _write(self, count: int) -> None:
        # Without a store nobody can be told; what is wrong with it ``missing`` finds out.
        with suppress(RuntimeError):
            self._store.set(str(self._rank), str(count))

    def _has_come(self, rank: int) -> bool:
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= self._count


def _is_started(thread: threading.Thread) -> bool:
    """Start a thread; Python 3.12 and later start none while a program ends."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
