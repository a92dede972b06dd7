"""A thread pool: several requests to the disk at a time.

[Note: interrupts]
Before Python 3.13 a ``Thread.join`` that is interrupted takes the thread for one that has ended,
and all later ones return at once, that at the end of the program too. So whoever may be
interrupted waits for something that the thread says itself, and joins it afterwards, if at all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

# While one thread compares checksums the others keep the disk busy.
_NUM_THREADS = 3


def parallel_for(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``work`` on every item, a few at a time; stop at and raise the first error."""
    remaining = ((item,) for item in items)
    try:
        remaining = itertools.chain([next(remaining)], remaining)
    except StopIteration:
        return  # threads cost something even if there is nothing to do
    changed = threading.Condition()
    failed = threading.Event()
    num_busy = 0

    def run() -> None:
        nonlocal num_busy
        while True:
            with changed:
                item = None if failed.is_set() else next(remaining, None)
                if item is None:
                    return
                num_busy += 1
            try:
                work(item[0])
            except BaseException:
                failed.set()
                raise
            finally:
                with changed:
                    num_busy -= 1
                    changed.notify_all()

    running: list[Future[None]] = []
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="vescale-ckpt-read") as pool:
        try:
            running.extend(pool.submit(run) for _ in range(_NUM_THREADS))
            wait(running)
        except BaseException:
            # See [Note: interrupts]: threads must not go on behind the caller, and the pool does
            # not know of one that it was just starting.
            with changed:
                failed.set()
                changed.wait_for(lambda: not num_busy)
            raise
    for future in running:
        future.result()
