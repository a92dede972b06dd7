"""Read every block that a rank needs once, check it, and fill tensors on all ranks with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from ._exchange import exchange
from ._group import Ranks
from ._numbering import Numbering
from ._parts import PartSums
from ._pieces import Piece
from ._read import Reader
from ._runs import Bytes
from ._shares import Readers, choose_readers
from ._tensor_bytes import CHUNK_NBYTES
from ._threads import in_threads


def fill(reader: Reader, pieces: Sequence[Piece], ranks: Ranks) -> None:
    """Read ``pieces``; see [Note: readers]. Every rank must call this.

    Raises:
        CorruptCheckpointError: If a block that this rank has read is damaged. The other ranks
            have to be told; what the pieces hold then is undefined.
    """
    whole = [piece for piece in pieces if not piece.is_torn]
    numbering = Numbering(reader.record)
    readers = choose_readers(numbering, whole, ranks, in_parts=True)
    filling = _Filling(reader, numbering, whole, readers, ranks.rank)
    torn = [piece for piece in pieces if piece.is_torn]
    # While ranks wait for one another they can read what is theirs alone.
    with ThreadPoolExecutor(1, thread_name_prefix="vescale-ckpt-read") as pool:
        alone = pool.submit(filling.read_alone, torn)
        failure = exchange(whole, readers, numbering, ranks, filling.read_shared)
        failure = alone.result() or failure
    filling.sums.check(failure, ranks)
    if failure is not None:
        raise failure


def check(reader: Reader, pieces: Sequence[Piece], ranks: Ranks) -> None:
    """Read and check what ``pieces`` need, changing nothing. Every rank must call this.

    Raises:
        CorruptCheckpointError: If a block that this rank has read is damaged.
    """
    numbering = Numbering(reader.record)
    readers = choose_readers(numbering, pieces, ranks, in_parts=False)
    own = np.flatnonzero(readers.reader == ranks.rank).tolist()
    in_threads(reader.check_blocks, numbering.chunks(own, _most(numbering)))


def _most(numbering: Numbering) -> int:
    return max(1, CHUNK_NBYTES // numbering.block_nbytes)


class _Unit(NamedTuple):
    """Consecutive bytes of a file to read: a block, or a part of one."""

    file: str
    start: int
    stop: int
    block: int
    is_part: bool


class _Filling:
    """What this rank reads, and which of its own pieces that fills."""

    def __init__(
        self,
        reader: Reader,
        numbering: Numbering,
        pieces: Sequence[Piece],
        readers: Readers,
        rank: int,
    ) -> None:
        self.reader = reader
        self.numbering = numbering
        self.pieces = pieces
        self.sums = PartSums(reader, numbering, readers)
        is_own = readers.reader == rank
        self.alone: list[int] = np.flatnonzero(is_own & ~readers.is_shared).tolist()
        self.split: list[tuple[int, Piece]] = []
        self.by_block: dict[int, list[int]] = {}
        for index, piece in enumerate(pieces):
            start, stop = numbering.span(piece.stored.file, piece.runs)
            is_split = readers.is_split[start:stop]
            for block in (np.flatnonzero(is_own[start:stop] | is_split) + start).tolist():
                self.by_block.setdefault(block, []).append(index)
                if is_split[block - start]:
                    self.split.append((block, piece))

    def read_alone(self, torn: Sequence[Piece]) -> Exception | None:
        """Read what no other rank needs; return what went wrong."""
        try:
            in_threads(self._read, self._stretches())
            in_threads(self.reader.read_torn, torn)
        except Exception as error:
            return error
        return None

    def read_shared(self, block: int, memory: Bytes) -> None:
        """Read a block that others need, too."""
        (blocks,) = self.numbering.chunks([block], 1)
        content = self.reader.read_blocks(blocks, memory)
        base = blocks.start * self.numbering.block_nbytes
        self._fill(base, content, [block])

    def _stretches(self) -> Iterator[list[_Unit]]:
        """Yield adjacent units that are read with one request."""
        stretch: list[_Unit] = []
        for unit in sorted(itertools.chain(self._blocks(), self._parts())):
            if stretch:
                first, last = stretch[0], stretch[-1]
                adjacent = (unit.file, unit.start) == (last.file, last.stop)
                if not adjacent or unit.stop - first.start > CHUNK_NBYTES:
                    yield stretch
                    stretch = []
            stretch.append(unit)
        if stretch:
            yield stretch

    def _blocks(self) -> Iterator[_Unit]:
        for blocks in self.numbering.chunks(self.alone, 1):
            block = self.numbering.firsts[blocks.file] + blocks.start
            start = self.numbering.start(blocks.file, block)
            stop = start + int(self.numbering.lengths[block])
            yield _Unit(blocks.file, start, stop, block, is_part=False)

    def _parts(self) -> Iterator[_Unit]:
        for block, piece in self.split:
            file, runs = piece.stored.file, piece.runs
            edge = self.numbering.start(file, block)
            start, stop = max(runs.start, edge), min(runs.stop, edge + self.numbering.block_nbytes)
            yield _Unit(file, start, stop, block, is_part=True)

    def _read(self, stretch: Sequence[_Unit]) -> None:
        file, base = stretch[0].file, stretch[0].start
        content = self.reader.read_range(file, base, stretch[-1].stop)
        for unit in stretch:
            own = content[unit.start - base : unit.stop - base]
            if unit.is_part:
                self.sums.add(file, unit.start, own)
            else:
                self.reader.check_content(file, unit.block - self.numbering.firsts[file], own)
        self._fill(base, content, [unit.block for unit in stretch])

    def _fill(self, base: int, content: Bytes, blocks: Sequence[int]) -> None:
        """Fill this rank's pieces with what has been read of some blocks of a file."""
        found = (self.by_block.get(block, ()) for block in blocks)
        for index in sorted(set(itertools.chain.from_iterable(found))):
            self.pieces[index].fill_from(content, base)
