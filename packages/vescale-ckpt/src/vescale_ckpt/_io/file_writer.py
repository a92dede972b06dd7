"""Write a file in large aligned requests, past the page cache where that works.

[Note: direct writes]
Data is packed into page-aligned buffers, one of which is filled while others are on their way to
the disk. Whole pages of a buffer go to the disk directly; that costs a tenth of the processor time
of the page cache and does not push other data out of memory. The first and the last page of a
stretch may belong partly to another rank, so their bytes go through the page cache, which
merges them. A page is therefore never written both ways by one rank, and where two ranks
share a page, both go through the cache.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from vescale_ckpt._format.byte_ranges import Bytes
from vescale_ckpt._format.crc32 import PartialBlockCrcs

from .buffer_pool import keep_buffer, take_buffer
from .direct_io import MIN_DIRECT_NBYTES, PAGE_NBYTES, open_direct
from .tensor_bytes import CHUNK_NBYTES

_BUFFER_NBYTES = CHUNK_NBYTES
_NUM_BUFFERS = 4
_NUM_THREADS = 2


class Buffers(AbstractContextManager["Buffers"]):
    """Aligned buffers and the threads that empty them; shared by the files of a save.

    Python 3.12 and later start no thread while a program ends, which a save in the background
    may outlive: then whoever fills the buffers empties them, too.
    """

    def __init__(self) -> None:
        self._failures: list[BaseException] = []
        self._empty: SimpleQueue[Bytes] = SimpleQueue()
        self._full: SimpleQueue[tuple[Bytes, Callable[[], None]] | None] = SimpleQueue()
        for _ in range(_NUM_BUFFERS):
            self._empty.put(take_buffer())
        self._threads: list[threading.Thread] = []
        self._is_stopped = False
        try:
            for _ in range(_NUM_THREADS):
                # Before it starts: an interrupt may come when it has, and start() waits for it.
                name = "vescale-ckpt-write"
                self._threads.append(threading.Thread(target=self._empty_them, name=name))
                self._threads[-1].start()
        except RuntimeError:
            self._threads.pop()
        except BaseException:
            self.stop()  # a thread that waits would keep the process from ending
            raise

    def take(self) -> Bytes:
        """Return a buffer as soon as one is empty; raise what went wrong."""
        buffer = self._empty.get()
        if self._failures:
            self._empty.put(buffer)
            raise self._failures[0]
        return buffer

    def give(self, buffer: Bytes, write: Callable[[], None]) -> None:
        """Take a buffer back after a thread has called ``write``, unless one has failed before."""
        if self._is_stopped:
            raise RuntimeError("the threads that write have been stopped")
        self._full.put((buffer, write))
        if not self._threads:
            self._full.put(None)
            self._empty_them()

    def wait(self) -> None:
        """Wait until everything is written and all buffers are back; raise what went wrong."""
        if self._threads:
            for buffer in [self._empty.get() for _ in range(_NUM_BUFFERS)]:
                self._empty.put(buffer)
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        """End the threads after what they have been given.

        Unlike :meth:`wait` this ends even if a buffer went missing, because an interrupt came
        just when it changed hands.
        """
        for _ in self._threads:
            self._full.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # one that was interrupted as it started ends by itself
                thread.join()
        self._threads.clear()
        self._is_stopped = True

    def _empty_them(self) -> None:
        while (full := self._full.get()) is not None:
            buffer, write = full
            try:
                if not self._failures:
                    write()
            except BaseException as error:
                self._failures.append(error)
            self._empty.put(buffer)

    def __exit__(self, *problem: object) -> None:
        self.stop()
        while not self._empty.empty():
            keep_buffer(self._empty.get())


class FileWriter(AbstractContextManager["FileWriter"]):
    """One rank's writes to a file that all ranks share. See [Note: direct writes].

    Attributes:
        sums: The checksums of what was written.
    """

    def __init__(self, path: Path, sums: PartialBlockCrcs, buffers: Buffers) -> None:
        self.sums = sums
        self._buffers = buffers
        self._buffer: Bytes | None = None
        self._is_finished = False
        # The stretch of the file in the buffer, whose byte 0 is that at ``_base``.
        self._base = self._start = self._stop = 0
        self._cached = os.open(path, os.O_WRONLY)
        self._direct = open_direct(path, os.O_WRONLY)

    def account(self, sums: PartialBlockCrcs) -> None:
        """Take account of what is written from now on in ``sums``."""
        if sums is not self.sums:
            self._flush()
            self.sums = sums

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes; cheapest if ``offset`` is where the last write ended."""
        content = np.frombuffer(view, np.uint8)

        def copy(start: int, memory: Bytes) -> None:
            memory[:] = content[start - offset : start - offset + len(memory)]

        self.write_from(offset, len(content), copy)

    def write_from(self, offset: int, nbytes: int, fill: Callable[[int, Bytes], None]) -> None:
        """Write bytes that are put together where they are written from.

        ``fill`` is called with places in the file, one after the other, and the memory to fill
        with what belongs there.
        """
        stop = offset + nbytes
        while offset < stop:
            if offset != self._stop or self._buffer is None:
                self._flush()
                self._buffer = self._buffers.take()
                self._base = offset // PAGE_NBYTES * PAGE_NBYTES
                self._start = self._stop = offset
            position = offset - self._base
            end = min(position + stop - offset, _BUFFER_NBYTES)
            fill(offset, self._buffer[position:end])
            self._stop = offset = self._base + end
            if end == _BUFFER_NBYTES:
                self._flush()

    def write_through_cache(self, offset: int, view: memoryview) -> None:
        """Write bytes that are few and far from others."""
        self.sums.add(offset, view)
        _write(self._cached, offset, view)

    def finish(self) -> None:
        """Return once everything is on the disk."""
        self._flush()
        self._buffers.wait()
        os.fsync(self._cached)
        self._is_finished = True

    def __exit__(self, *problem: object) -> None:
        if not self._is_finished:
            # The descriptors must stay open until the threads have done with them.
            self._buffers.stop()
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def _flush(self) -> None:
        """Hand the buffer to a thread."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        start, view = self._start, buffer.data[self._start - self._base : self._stop - self._base]
        self.sums.add(start, view)
        self._buffers.give(buffer, lambda: self._write_stretch(start, view))

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
