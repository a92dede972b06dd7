"""Write a file in large aligned requests, past the page cache where that works.

[Note: direct writes]
Data is packed into one of two page-aligned buffers while the other is on its way to the disk.
Whole pages of a buffer go to the disk directly; that costs a tenth of the processor time of
the page cache and does not push other data out of memory. The first and the last page of a
stretch may belong partly to another rank, so their bytes go through the page cache, which
merges them. A page is therefore never written both ways by one rank, and where two ranks
share a page, both go through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from ._crc import PartialSums
from ._direct import MIN_DIRECT_NBYTES, PAGE_NBYTES, open_direct

_BUFFER_NBYTES = 4 << 20


class Buffers(AbstractContextManager["Buffers"]):
    """Two aligned buffers and the thread that empties them; shared by the files of a save."""

    def __init__(self) -> None:
        self.memory = [mmap.mmap(-1, _BUFFER_NBYTES) for _ in range(2)]
        self.busy: list[Future[None] | None] = [None, None]
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="vescale-ckpt-write")

    def wait(self) -> None:
        """Wait until everything is written; raise what went wrong."""
        for index, future in enumerate(self.busy):
            self.busy[index] = None
            if future is not None:
                future.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.shutdown(wait=True)


class FileWriter(AbstractContextManager["FileWriter"]):
    """One rank's writes to a file that all ranks share. See [Note: direct writes].

    Attributes:
        sums: The checksums of what was written.
    """

    def __init__(self, path: Path, sums: PartialSums, buffers: Buffers) -> None:
        self.sums = sums
        self._buffers = buffers
        self._current = 0
        # The stretch of the file in the current buffer, whose byte 0 is that at ``_base``.
        self._base = self._start = self._stop = 0
        self._cached = os.open(path, os.O_WRONLY)
        self._direct = open_direct(path, os.O_WRONLY)

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes; cheapest if ``offset`` is where the last write ended."""
        while view:
            if offset != self._stop or self._stop == self._base + _BUFFER_NBYTES:
                self._flush()
                self._base = offset // PAGE_NBYTES * PAGE_NBYTES
                self._start = self._stop = offset
            position = offset - self._base
            count = min(len(view), _BUFFER_NBYTES - position)
            self._buffers.memory[self._current][position : position + count] = view[:count]
            view, offset = view[count:], offset + count
            self._stop = offset

    def write_through_cache(self, offset: int, view: memoryview) -> None:
        """Write bytes that are few and far from others."""
        self.sums.add(offset, view)
        _write(self._cached, offset, view)

    def finish(self) -> None:
        """Return once everything is on the disk."""
        self._flush()
        self._buffers.wait()
        os.fsync(self._cached)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._abandon()
        finally:
            os.close(self._cached)
            if self._direct is not None:
                os.close(self._direct)

    def _abandon(self) -> None:
        # The descriptors must stay open until the thread has done with them.
        for future in self._buffers.busy:
            if future is not None:
                future.exception()
        self._buffers.busy = [None, None]

    def _flush(self) -> None:
        """Hand the current buffer to the thread and take the other one."""
        if self._start == self._stop:
            return
        memory = memoryview(self._buffers.memory[self._current])
        view = memory[self._start - self._base : self._stop - self._base]
        self.sums.add(self._start, view)
        future = self._buffers.pool.submit(self._write_stretch, self._start, view)
        self._buffers.busy[self._current] = future
        self._current = 1 - self._current
        self._start = self._stop
        other, self._buffers.busy[self._current] = self._buffers.busy[self._current], None
        if other is not None:
            other.result()

    def _write_stretch(self, start: int, view: memoryview) -> None:
        stop = start + len(view)
        first = -(-start // PAGE_NBYTES) * PAGE_NBYTES
        last = stop // PAGE_NBYTES * PAGE_NBYTES
        if self._direct is None or last - first < MIN_DIRECT_NBYTES:
            _write(self._cached, start, view)
            return
        _write(self._cached, start, view[: first - start])
        try:
            _write(self._direct, first, view[first - start : last - start])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system wants another alignment than any we know.
            _write(self._cached, first, view[first - start : last - start])
        _write(self._cached, last, view[last - start :])


def _write(descriptor: int, offset: int, view: memoryview) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
