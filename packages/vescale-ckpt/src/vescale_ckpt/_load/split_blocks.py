"""Split blocks: those that several ranks read in parts.

[Note: parts]
Where the shards of two ranks meet within a block, each reads its own part of it. The checksum of
the block is checked nevertheless: each rank computes a register of its part, and they combine
as those of several writers do, see [Note: partial checksums].
"""

from __future__ import annotations

import threading

import numpy as np
import torch.distributed as dist

from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._format.blocks import BlockIndex
from vescale_ckpt._format.byte_ranges import Bytes
from vescale_ckpt._format.crc32 import PartialBlockCrcs, checksums_by_file
from vescale_ckpt._store.reader import CheckpointReader

from .read_assignment import ReadAssignment


class SplitBlockCheck:
    """The registers of this rank's parts."""

    def __init__(
        self, reader: CheckpointReader, block_index: BlockIndex, readers: ReadAssignment
    ) -> None:
        self._reader = reader
        self._block_index = block_index
        self._split = np.flatnonzero(readers.is_split)
        self._lock = threading.Lock()
        self._sums = {
            name: PartialBlockCrcs(file.nbytes, block_index.block_nbytes)
            for name, file in reader.manifest.files.items()
        }

    def add(self, file: str, offset: int, content: Bytes) -> None:
        """Take account of a part that has been read."""
        with self._lock:
            self._sums[file].add(offset, content.data)

    def check(self, failure: Exception | None, ranks: ControlGroup) -> None:
        """Compare checksums with what all ranks have read. Every rank must call this.

        ``failure`` is why this rank has not read all of its parts, if so.

        Raises:
            CorruptCheckpointError: If a block is damaged; on every rank.
        """
        if not len(self._split):
            return
        failed = np.array([failure is not None], np.int32)
        ranks.reduce(failed, dist.ReduceOp.MAX)
        if failed[0]:
            return
        registers = np.concatenate([sums.folded() for sums in self._sums.values()])
        words = registers[self._split]
        ranks.reduce(words.view(np.int32), dist.ReduceOp.BXOR)
        registers[self._split] = words
        for name, actual in checksums_by_file(self._sums, registers).items():
            first = self._block_index.firsts[name]
            expected = self._reader.manifest.files[name].checksums
            for block in (self._split - first).tolist():
                if 0 <= block < len(expected) and expected[block] != actual[block]:
                    raise ranks.common(self._reader.damage(name, block))
