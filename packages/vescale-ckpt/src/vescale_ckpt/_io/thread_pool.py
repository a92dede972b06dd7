"""A thread pool: several requests to the disk at a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# While one thread compares checksums the others keep the disk busy.
_NUM_THREADS = 3


def parallel_for(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``work`` on every item, a few at a time; stop at and raise the first error."""
    remaining = iter(items)
    try:
        remaining = itertools.chain([next(remaining)], remaining)
    except StopIteration:
        return  # threads cost something even if there is nothing to do
    lock = threading.Lock()
    failed = threading.Event()

    def run() -> None:
        while not failed.is_set():
            with lock:
                try:
                    item = next(remaining)
                except StopIteration:
                    return
            try:
                work(item)
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="vescale-ckpt-read") as pool:
        running = [pool.submit(run) for _ in range(_NUM_THREADS)]
    for future in running:
        future.result()
