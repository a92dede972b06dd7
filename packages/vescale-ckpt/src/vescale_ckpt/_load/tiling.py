"""Tiling: do the parts of a block that ranks need make it up, without gap and overlap?

[Note: tiling]
Give every place in a file a random number. A rank that needs the bytes from ``a`` to ``b`` adds
``number(b) - number(a)`` to the block's sum; where one part ends and another begins, the numbers
cancel. If the sum over all ranks is that of the whole block, then the parts make up the block,
but for a chance of one in 2^40. So one sum for each block tells, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vescale_ckpt._format.blocks import BlockIndex, Integers

from .read_items import ReadItem

# Fewer bytes than this are not worth a request of their own.
MIN_PART_NBYTES = 4 << 10


def _numbers(places: Integers) -> Integers:
    """Return random numbers below 2^40, so that millions of them can be added."""
    mixed = places.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(24)).astype(np.int64)


def full_tiling(block_index: BlockIndex) -> Integers:
    """Return the sum of each block if parts make it up; see [Note: tiling]."""
    starts = np.arange(block_index.count, dtype=np.int64) * block_index.block_nbytes
    return _numbers(starts + block_index.lengths) - _numbers(starts)


def tiling(block_index: BlockIndex, items: Sequence[ReadItem], rank: int) -> Integers:
    """Return what a rank adds to the sum of each block; see [Note: tiling].

    Where it needs short or scattered ranges that is something that never fits.
    """
    (veto,) = _numbers(np.array([-rank - 1])).tolist()
    scattered = [block_index.span(p.stored.file, p.ranges) for p in items if p.ranges.counts]
    covered = veto * times_covered(block_index.count, np.array(scattered, np.int64))
    ends = [block_index.places(p.stored.file, p.ranges) for p in items if not p.ranges.counts]
    if not ends:
        return covered
    starts, stops = np.array(ends, np.int64).T
    length = block_index.block_nbytes
    first, last = starts // length, -(-stops // length) - 1
    # The blocks between the first and the last one are needed as a whole.
    inner = times_covered(block_index.count, np.stack([first + 1, np.maximum(last, first + 1)], 1))
    covered += inner * full_tiling(block_index)
    is_longer = last > first
    blocks = np.concatenate([first, last[is_longer]])
    lowers = np.concatenate([starts, last[is_longer] * length])
    uppers = np.concatenate([np.minimum(stops, (first + 1) * length), stops[is_longer]])
    is_short = uppers - lowers < MIN_PART_NBYTES
    added = np.where(is_short, veto, _numbers(uppers) - _numbers(lowers))
    np.add.at(covered, blocks, added)
    return covered


def times_covered(count: int, spans: Integers) -> Integers:
    """Return in how many of the spans, rows of (first, end), each block lies."""
    steps = np.zeros(count + 2, np.int64)
    if len(spans):
        np.add.at(steps, spans[:, 0], 1)
        np.add.at(steps, spans[:, 1], -1)
    return np.cumsum(steps)[:count]
