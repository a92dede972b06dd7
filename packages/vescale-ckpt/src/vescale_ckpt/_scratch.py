"""Memory that is used again and again: fresh memory costs more than what is done with it."""

from __future__ import annotations

import mmap

import numpy as np

from ._direct import PAGE_NBYTES
from ._runs import Bytes


class Scratch:
    """Named memory that stays allocated from one use to the next."""

    def __init__(self) -> None:
        self._arrays: dict[str, Bytes] = {}

    def take(self, name: str, nbytes: int) -> Bytes:
        """Return ``nbytes`` of the memory called ``name``, whatever is in it."""
        if name not in self._arrays or len(self._arrays[name]) < nbytes:
            self._arrays[name] = np.empty(nbytes, np.uint8)
        return self._arrays[name][:nbytes]


def pages(nbytes: int) -> Bytes:
    """Return at least ``nbytes`` of memory that starts and ends with a page."""
    whole = max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES
    return np.frombuffer(mmap.mmap(-1, whole), np.uint8)
