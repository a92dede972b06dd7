"""The block index: the blocks of all files of a checkpoint as one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .byte_ranges import ByteRanges
from .manifest import Manifest

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive blocks of a file, at most CHUNK_NBYTES together."""

    file: str
    start: int
    stop: int


class BlockIndex:
    """The blocks of all files of a checkpoint, numbered from 0 on.

    Attributes:
        block_nbytes: Length of a block.
        files: Names of the files.
        firsts: Number of each file's first block.
        count: Number of blocks.
        lengths: Length of each block; that of a file's last one may be shorter.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.block_nbytes = manifest.block_nbytes
        self.files = tuple(manifest.files)
        self.firsts: dict[str, int] = {}
        self.count = 0
        lengths: list[Integers] = [np.empty(0, np.int64)]
        for name, file in manifest.files.items():
            self.firsts[name] = self.count
            starts = np.arange(0, file.nbytes, self.block_nbytes, dtype=np.int64)
            lengths.append(np.minimum(self.block_nbytes, file.nbytes - starts))
            self.count += len(starts)
        self.lengths = np.concatenate(lengths)

    def span(self, file: str, ranges: ByteRanges) -> tuple[int, int]:
        """Return the first block of ``ranges`` and the one after the last."""
        first = self.firsts[file]
        return (
            first + ranges.start // self.block_nbytes,
            first + -(-ranges.stop // self.block_nbytes),
        )

    def places(self, file: str, ranges: ByteRanges) -> tuple[int, int]:
        """Return where ``ranges`` start and stop if all files were one, of whole blocks."""
        base = self.firsts[file] * self.block_nbytes
        return base + ranges.start, base + ranges.stop

    def start(self, file: str, block: int) -> int:
        """Return where in its file a block starts."""
        return (block - self.firsts[file]) * self.block_nbytes

    def chunks(self, blocks: Iterable[int], most: int) -> Iterator[Blocks]:
        """Put consecutive blocks, in increasing order, together, at most ``most`` of them."""
        # Blocks of two files may have consecutive numbers, but are not read together.
        bounds = [*self.firsts.values(), self.count]
        file = 0
        chunk: tuple[int, int] | None = None
        for block in blocks:
            if chunk and block == chunk[1] < bounds[file + 1] and chunk[1] - chunk[0] < most:
                chunk = (chunk[0], block + 1)
                continue
            if chunk:
                yield self._chunk(file, *chunk)
            while block >= bounds[file + 1]:
                file += 1
            chunk = (block, block + 1)
        if chunk:
            yield self._chunk(file, *chunk)

    def _chunk(self, file: int, start: int, stop: int) -> Blocks:
        name = self.files[file]
        return Blocks(name, start - self.firsts[name], stop - self.firsts[name])
