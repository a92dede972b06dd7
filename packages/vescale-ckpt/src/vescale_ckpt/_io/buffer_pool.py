"""A pool of buffers: memory that is used again and again.

[Note: kept buffers]
Memory that a process touches for the first time costs a fault for each page, on a virtual machine
another one on its host, and a disk that takes or fills it past the page cache waits for both. So
the aligned buffers of a save or a load are kept for the next one.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from vescale_ckpt._format.byte_ranges import Bytes

from .direct_io import PAGE_NBYTES
from .tensor_bytes import CHUNK_NBYTES

_MAX_KEPT = 4
# Appending and popping are atomic. The memory is private: after a fork each process has its own.
_kept: list[Bytes] = []


class Scratch:
    """Named memory that stays allocated from one use to the next."""

    def __init__(self) -> None:
        self._arrays: dict[str, Bytes] = {}

    def take(self, name: str, nbytes: int) -> Bytes:
        """Return ``nbytes`` of the memory called ``name``, whatever is in it."""
        if name not in self._arrays or len(self._arrays[name]) < nbytes:
            self._arrays[name] = np.empty(nbytes, np.uint8)
        return self._arrays[name][:nbytes]


def take_buffer() -> Bytes:
    """Return whole pages for CHUNK_NBYTES from anywhere in a page; see [Note: kept buffers]."""
    try:
        return _kept.pop()
    except IndexError:
        return pages(CHUNK_NBYTES + PAGE_NBYTES)


def keep_buffer(buffer: Bytes) -> None:
    """Keep for the next one what :func:`take_buffer` has returned; nobody may use it any more."""
    if len(_kept) < _MAX_KEPT:
        _kept.append(buffer)


def pages(nbytes: int) -> Bytes:
    """Return at least ``nbytes`` of memory that starts and ends with a page."""
    whole = max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # macOS lacks them
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
