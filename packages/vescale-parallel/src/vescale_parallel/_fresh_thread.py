"""Run something apart from what this thread has set up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_fresh_thread(run: Callable[[], T]) -> T:
    """Run something without the modes of this thread: autocast, inference, counters, devices."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
