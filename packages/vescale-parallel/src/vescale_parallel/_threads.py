"""Ranks that are threads of this process, and threads without their caller's modes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ._tp_ranks import Meeting

T = TypeVar("T")


def run_in_threads(size: int, on_rank: Callable[[int, Meeting], Any]) -> list[Any]:
    """Call a function on every rank, each in a thread of its own.

    Raises:
        Exception: Whatever the first rank that failed raised.
    """
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def work(rank: int) -> None:
        try:
            results[rank] = on_rank(rank, meeting)
        # Handed to the caller below.
        except Exception as error:
            errors.append(error)
            meeting.give_up()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


def in_fresh_thread(run: Callable[[], T]) -> T:
    """Run something without the modes of this thread: autocast, inference, counters, devices."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
