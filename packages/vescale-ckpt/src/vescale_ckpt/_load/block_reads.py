"""Block reads: what a rank reads itself, straight into tensors where that goes.

[Note: straight]
What is in the page cache is copied from there to where it belongs, a block at a time, so that its
checksum is computed while it is in the processor's cache. What is not is read past the page
cache, in larger stretches, into aligned memory, and goes from there. What several ranks need is
read through the page cache, so that the disk reads it once for all ranks of a host.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from vescale_ckpt._format.blocks import BlockIndex
from vescale_ckpt._format.byte_ranges import Bytes
from vescale_ckpt._io.tensor_bytes import CHUNK_NBYTES
from vescale_ckpt._io.thread_pool import parallel_for
from vescale_ckpt._store.reader import CheckpointReader

from .read_assignment import ReadAssignment
from .read_items import ReadItem
from .split_blocks import SplitBlockCheck

# More places than this are cheaper to fill from one than to read into.
_MAX_VIEWS = 32


class _Check(IntEnum):
    """Who compares the checksum of what is read."""

    HERE = 0
    TOGETHER = 1  # see [Note: parts]
    ELSEWHERE = 2


class BlockRead(NamedTuple):
    """Consecutive bytes of a file to read: a block, or what a rank needs of one.

    Attributes:
        file: Its name.
        start: First byte.
        stop: The byte after the last.
        block: The block they lie in, numbered through all files.
        check: Who compares its checksum.
        is_shared: Whether other ranks read these bytes, too.
    """

    file: str
    start: int
    stop: int
    block: int
    check: _Check
    is_shared: bool


class BlockReads:
    """What this rank reads, and which of its own read items that fills.

    When ``exchanging``, others send what they have read. As many threads as there are
    ``processors`` may copy and check at a time, while others wait for the disk.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        block_index: BlockIndex,
        items: Sequence[ReadItem],
        readers: ReadAssignment,
        rank: int,
        *,
        exchanging: bool,
        processors: int,
    ) -> None:
        self.reader = reader
        self.sums = SplitBlockCheck(reader, block_index, readers)
        self._block_index = block_index
        self._exchanging = exchanging
        self._reader_of: list[int] = readers.reader.tolist()
        self._is_shared: list[bool] = readers.is_shared.tolist()
        self._is_split: list[bool] = readers.is_split.tolist()
        self._rank = rank
        self._is_alone = processors == 1
        self._turns = threading.Semaphore(processors)
        self._is_stopped = threading.Event()
        # The read items in each block that this rank reads, in file order.
        self._in_block: dict[int, list[ReadItem]] = {}
        for item in items:
            for block in range(*block_index.span(item.stored.file, item.ranges)):
                if self._reads(block):
                    self._in_block.setdefault(block, []).append(item)

    def _reads(self, block: int) -> bool:
        return (
            not self._exchanging or self._is_split[block] or self._reader_of[block] == self._rank
        )

    def read_all(self) -> None:
        """Read everything; stop at and raise the first error."""
        waiting: list[tuple[list[BlockRead], bool]] = []
        for stretch in self._stretches():
            if self._is_stopped.is_set():
                return
            first, last = stretch[0], stretch[-1]
            is_cached = self.reader.is_cached(first.file, first.start, last.stop)
            # Threads that take turns on one processor only cost time, unless they wait.
            if is_cached and self._is_alone:
                self._copy(stretch)
            else:
                waiting.append((stretch, is_cached))
        parallel_for(self._read, waiting)

    def stop(self) -> None:
        """Have :meth:`read_all`, in another thread, end before everything is read."""
        self._is_stopped.set()

    def _stretches(self) -> Iterator[list[BlockRead]]:
        """Yield adjacent block reads that are read together, CHUNK_NBYTES at most."""
        stretch: list[BlockRead] = []
        for read in self._block_reads():
            if stretch:
                first, last = stretch[0], stretch[-1]
                adjacent = (read.file, read.start) == (last.file, last.stop)
                alike = read.is_shared == last.is_shared
                if not (adjacent and alike) or read.stop - first.start > CHUNK_NBYTES:
                    yield stretch
                    stretch = []
            stretch.append(read)
        if stretch:
            yield stretch

    def _block_reads(self) -> Iterator[BlockRead]:
        bounds = [*self._block_index.firsts.values(), self._block_index.count]
        for (first, last), name in zip(
            itertools.pairwise(bounds), self._block_index.files, strict=True
        ):
            for block in range(first, last):
                if block in self._in_block:
                    yield from self._of_block(name, block)

    def _of_block(self, file: str, block: int) -> Iterator[BlockRead]:
        is_shared = self._is_shared[block]
        start = self._block_index.start(file, block)
        stop = start + int(self._block_index.lengths[block])
        items = self._in_block[block]
        if self._is_split[block]:
            for item in items:
                lower, upper = max(item.ranges.start, start), min(item.ranges.stop, stop)
                yield BlockRead(file, lower, upper, block, _Check.TOGETHER, is_shared)
        elif self._reader_of[block] == self._rank:
            # The others are sent what they need of a shared one.
            if not (self._exchanging and is_shared):
                yield BlockRead(file, start, stop, block, _Check.HERE, is_shared)
        else:
            lower = max(start, min(item.ranges.start for item in items))
            upper = min(stop, max(item.ranges.stop for item in items))
            yield BlockRead(file, lower, upper, block, _Check.ELSEWHERE, is_shared)

    def read_to_send(self, block: int, memory: Bytes) -> None:
        """Read and check a block that others need, too, and fill this rank's own read items."""
        (blocks,) = self._block_index.chunks([block], 1)
        content = self.reader.read_blocks(blocks, memory)
        base = blocks.start * self._block_index.block_nbytes
        for item in self._in_block.get(block, ()):
            item.fill_from(content, base)

    def _read(self, found: tuple[Sequence[BlockRead], bool]) -> None:
        """Carry out adjacent block reads, check and hand out the bytes; see [Note: straight].

        With the block reads comes whether they are in the page cache.
        """
        if self._is_stopped.is_set():
            return
        stretch, is_cached = found
        file, start, stop = stretch[0].file, stretch[0].start, stretch[-1].stop
        if stretch[0].is_shared and not is_cached:
            is_cached = self.reader.bring_in(file, start, stop)
        if is_cached:
            with self._turns:
                self._copy(stretch)
            return
        content = self.reader.read_past_cache(file, start, stop)
        with self._turns:
            for read in stretch:
                own = content[read.start - start : read.stop - start]
                self._check(read, [own])
                self._spread(read, own)

    def _copy(self, stretch: Sequence[BlockRead]) -> None:
        """Carry out block reads that are in the page cache."""
        for read in stretch:
            scratch = self.reader.scratch()[: read.stop - read.start]
            views = self._views(read, scratch)
            self.reader.read_into(read.file, read.start, views or [scratch])
            self._check(read, views or [scratch])
            if views is None:
                self._spread(read, scratch)

    def _views(self, read: BlockRead, filler: Bytes) -> list[Bytes] | None:
        """Return memory of read items that makes up a block read, None if its bytes go to and fro.

        ``filler`` is memory of its length, for what belongs to no read item.
        """
        items = self._in_block[read.block]
        if len(items) > _MAX_VIEWS:
            return None
        views: list[Bytes] = []
        position = read.start
        for item in items:
            ranges, flat = item.ranges, item.flat
            # Many short places, or memory that is not contiguous, are filled by copying.
            if ranges.counts or flat is None:
                return None
            lower = max(ranges.start, read.start)
            upper = min(ranges.start + ranges.nbytes, read.stop)
            if lower >= upper:
                continue
            # Two read items need the same bytes, which are read into one place only.
            if lower < position:
                return None
            if position < lower:
                views.append(filler[position - read.start : lower - read.start])
            views.append(flat[lower - ranges.start : upper - ranges.start])
            position = upper
        if position < read.stop:
            views.append(filler[position - read.start :])
        return views

    def _check(self, read: BlockRead, views: Sequence[Bytes]) -> None:
        if read.check is _Check.HERE:
            number = read.block - self._block_index.firsts[read.file]
            self.reader.check_content(read.file, number, views)
        elif read.check is _Check.TOGETHER:
            position = read.start
            for view in views:
                self.sums.add(read.file, position, view)
                position += len(view)

    def _spread(self, read: BlockRead, content: Bytes) -> None:
        for item in self._in_block[read.block]:
            item.fill_from(content, read.start)
