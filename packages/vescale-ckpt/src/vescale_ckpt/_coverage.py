"""Do the parts of a block that ranks need make up the block, without gap and without overlap?

[Note: coverage]
Give every place in a file a random number. A rank that needs the bytes from ``a`` to ``b`` adds
``number(b) - number(a)`` to the block's sum; where one part ends and another begins, the numbers
cancel. If the sum over all ranks is that of the whole block, then the parts make up the block,
but for a chance of one in 2^40. So one sum for each block tells, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._numbering import Integers, Numbering
from ._pieces import Piece

# Fewer bytes than this are not worth a request of their own.
MIN_PART_NBYTES = 4 << 10


def _numbers(places: Integers) -> Integers:
    """Return random numbers below 2^40, so that millions of them can be added."""
    mixed = places.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(24)).astype(np.int64)


def full_coverage(numbering: Numbering) -> Integers:
    """Return the sum of each block if parts make it up; see [Note: coverage]."""
    starts = np.arange(numbering.count, dtype=np.int64) * numbering.block_nbytes
    return _numbers(starts + numbering.lengths) - _numbers(starts)


def coverage(numbering: Numbering, pieces: Sequence[Piece], rank: int) -> Integers:
    """Return what a rank adds to the sum of each block; see [Note: coverage].

    Where it needs short or scattered runs that is something that never fits.
    """
    covered = np.zeros(numbering.count, np.int64)
    full = full_coverage(numbering)
    edges: list[tuple[int, int, int]] = []
    (veto,) = _numbers(np.array([-rank - 1])).tolist()
    for piece in pieces:
        file, runs = piece.stored.file, piece.runs
        first, last = numbering.span(file, runs)
        if runs.counts:
            covered[first:last] += veto
            continue
        # The blocks between the first and the last one are needed as a whole.
        covered[first + 1 : last - 1] += full[first + 1 : last - 1]
        for block in {first, last - 1}:
            edge = numbering.start(file, block)
            lower = max(runs.start - edge, 0)
            upper = min(runs.stop - edge, numbering.block_nbytes)
            if upper - lower < MIN_PART_NBYTES:
                covered[block] += veto
            else:
                place = block * numbering.block_nbytes
                edges.append((block, place + lower, place + upper))
    if edges:
        blocks, lowers, uppers = np.array(edges, np.int64).T
        np.add.at(covered, blocks, _numbers(uppers) - _numbers(lowers))
    return covered
