"""Freed memory of the host, given back to the system."""

from __future__ import annotations

import ctypes
import sys


def give_memory_back() -> None:
    """Give memory that was freed back to the system, where the C library would keep it.

    glibc keeps what threads and large tensors have freed, for other allocations; it lies in
    pieces that a training step does not fit in (``malloc_trim``, glibc's manual).
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
