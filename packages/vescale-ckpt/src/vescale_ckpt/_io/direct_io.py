"""Direct I/O: files opened to be read or written past the page cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

PAGE_NBYTES = 4096
# Fewer bytes than this are not worth a request of their own to the disk.
MIN_DIRECT_NBYTES = 64 << 10


def open_direct(path: str | Path, flags: int, directory: int | None = None) -> int | None:
    """Return a descriptor for whole pages; None where the file system has no such thing.

    ``directory`` is a descriptor of what ``path`` is relative to.
    """
    if not hasattr(os, "O_DIRECT"):  # macOS
        return None
    try:
        return os.open(path, flags | os.O_DIRECT, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return None
        raise
