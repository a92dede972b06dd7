"""Read assignment: which rank reads which block, so that every block is checked by one.

[Note: readers]
Every block that somebody needs is read and checked by one of those who need it. Which one
follows from a hash of block and rank, so that replicas divide the work about equally; all ranks
learn it from one reduction, whose size depends on the checkpoint only, not on the number of
ranks. The others are sent what they need, or read it without checking. A block that one rank
needs is read by that rank, and one of which each rank needs a part of its own is read in parts,
see [Note: parts]: ranks that load what they have saved send each other nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._format.blocks import BlockIndex, Integers

from .read_items import ReadItem
from .tiling import full_tiling, tiling, times_covered

_NOBODY = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class ReadAssignment:
    """Who reads the blocks; the same on every rank.

    Attributes:
        reader: The rank that reads each block; -1 if nobody does, or many do.
        is_shared: Whether other ranks than the reader need a block, too.
        is_split: Whether ranks read a block in parts.
    """

    reader: Integers
    is_shared: npt.NDArray[np.bool_]
    is_split: npt.NDArray[np.bool_]


def assign_reads(
    block_index: BlockIndex, items: Sequence[ReadItem], ranks: ControlGroup, *, in_parts: bool
) -> ReadAssignment:
    """Find out who reads what; see [Note: readers]. Every rank must call this.

    ``in_parts`` lets several ranks read parts of a block.
    """
    spans = [block_index.span(item.stored.file, item.ranges) for item in items]
    needed = times_covered(block_index.count, np.array(spans, np.int64)) > 0
    nowhere = np.zeros(block_index.count, np.bool_)
    if ranks.size == 1:
        return ReadAssignment(np.where(needed, 0, -1), nowhere, nowhere)
    # The least of the bids, and of the negative ones, which is the greatest: a block of which they
    # are the same is needed by one rank only.
    bids = np.where(needed, _bids(block_index.count, ranks.rank), _NOBODY)
    both = np.stack([bids, np.where(needed, -bids, _NOBODY)])
    ranks.reduce(both, dist.ReduceOp.MIN)
    lowest, highest = both
    anybody = lowest != _NOBODY
    reader = np.where(anybody, lowest & 0xFFFFFFFF, -1)
    is_shared = anybody & (highest != -lowest)
    if not in_parts or not is_shared.any():
        return ReadAssignment(reader, is_shared, nowhere)
    covered = tiling(block_index, items, ranks.rank)
    ranks.reduce(covered, dist.ReduceOp.SUM)
    is_split = is_shared & (covered == full_tiling(block_index))
    return ReadAssignment(np.where(is_split, -1, reader), is_shared & ~is_split, is_split)


def _bids(count: int, rank: int) -> Integers:
    """Return, for each block, a number that mixes block and rank, and ends with the rank."""
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64((rank + 1) * 0xBF58476D1CE4E5B9 % (1 << 64))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(33) << np.uint64(32)).astype(np.int64) | rank
