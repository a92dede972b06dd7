"""Strided byte ranges: where a box lies in a file that holds the whole tensor, row by row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vescale_dtensor import Box

Bytes = npt.NDArray[np.uint8]

_Copy = tuple[int, int, tuple[int, ...], tuple[int, ...]]


class ByteRanges(NamedTuple):
    """Strided ranges of bytes, equally long, in the row-major order of a box: nested loops.

    Attributes:
        start: Where the first range starts in the file.
        nbytes: Length of each range.
        counts: Number of turns of each loop, outermost first; a box in one piece, or of no bytes,
            has none.
        steps: How far each turn goes in the file: at least as far as the loops inside reach.
    """

    start: int
    nbytes: int
    counts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    @property
    def num_ranges(self) -> int:
        """Number of ranges."""
        return math.prod(self.counts)

    @property
    def total_nbytes(self) -> int:
        """Number of bytes in all ranges."""
        return self.num_ranges * self.nbytes

    @property
    def stop(self) -> int:
        """Where the last range ends in the file."""
        stop = self.start + self.nbytes
        for count, step in zip(self.counts, self.steps, strict=True):
            stop += (count - 1) * step
        return stop

    def shifted(self, nbytes: int) -> ByteRanges:
        """Return the ranges as they lie that many bytes further on."""
        return ByteRanges(self.start + nbytes, self.nbytes, self.counts, self.steps)

    def offsets(self) -> Iterator[int]:
        """Yield where each range starts in the file."""
        for turns in itertools.product(*map(range, self.counts)):
            yield self.start + sum(map(int.__mul__, turns, self.steps))

    def locate(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file offset, start, stop) for bytes ``start`` onwards of the packed box.

        ``start`` and ``stop`` of a range are relative to the first byte asked for.
        """
        position = 0
        while position < nbytes:
            number, skipped = divmod(start + position, self.nbytes)
            length = min(self.nbytes - skipped, nbytes - position)
            yield self._offset(number) + skipped, position, position + length
            position += length

    def bytes_before(self, offset: int) -> int:
        """Return how many bytes of the packed box lie before ``offset`` in the file."""
        left = offset - self.start
        if left <= 0:
            return 0
        before = 0
        for count, step in zip(self.counts, self.steps, strict=True):
            # Behind the last turn, or in the gap after one, all bytes of that turn lie before.
            turn = min(left // step, count - 1)
            before = before * count + turn
            left -= turn * step
        return before * self.nbytes + min(left, self.nbytes)

    def scatter(self, packed: Bytes, start: int, target: Bytes, base: int) -> None:
        """Copy some bytes of the packed box to where they lie in the file.

        ``packed`` starts at byte ``start`` of the packed box, ``target`` at byte ``base`` of the
        file.
        """
        for position, offset, shape, steps in self._copies(start, len(packed)):
            places = np.ndarray(shape, np.uint8, target, offset - base, steps)
            places[...] = packed[position : position + math.prod(shape)].reshape(shape)

    def gather(self, source: Bytes, base: int, start: int, packed: Bytes) -> None:
        """Copy some bytes of the file to where they are in the packed box.

        ``source`` starts at byte ``base`` of the file, ``packed`` at byte ``start`` of the packed
        box.
        """
        for position, offset, shape, steps in self._copies(start, len(packed)):
            places = np.ndarray(shape, np.uint8, source, offset - base, steps)
            packed[position : position + math.prod(shape)].reshape(shape)[...] = places

    def _copies(self, start: int, nbytes: int) -> Iterator[_Copy]:
        """Yield (position, file offset, shape, steps) of copies that make up a packed piece."""
        if not nbytes:
            return
        first, head = divmod(start, self.nbytes)
        last, tail = divmod(start + nbytes, self.nbytes)
        if first == last or not self.counts:
            yield 0, self._offset(first) + head, (nbytes,), (1,)
            return
        position = 0
        if head:
            position = self.nbytes - head
            yield 0, self._offset(first) + head, (position,), (1,)
            first += 1
        for offset, depth, count in self._loops(first, last):
            shape = (count, *self.counts[depth + 1 :], self.nbytes)
            yield position, offset, shape, (*self.steps[depth:], 1)
            position += math.prod(shape)
        if tail:
            yield position, self._offset(last), (tail,), (1,)

    def _loops(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Divide ranges ``first`` to ``last`` into (file offset, loop, number of whole turns)."""
        while first < last:
            # From the innermost loop outwards, while whole loops start here and end before last.
            turn, depth = 1, len(self.counts) - 1
            while depth > 0 and not first % (longer := turn * self.counts[depth]):
                if first + longer > last:
                    break
                turn, depth = longer, depth - 1
            left = self.counts[depth] - first // turn % self.counts[depth]
            count = min((last - first) // turn, left)
            yield self._offset(first), depth, count
            first += count * turn

    def _offset(self, number: int) -> int:
        offset = self.start
        for count, step in zip(reversed(self.counts), reversed(self.steps), strict=True):
            number, turn = divmod(number, count)
            offset += turn * step
        return offset


def byte_ranges_of(shape: tuple[int, ...], box: Box, itemsize: int, start: int = 0) -> ByteRanges:
    """Return the byte ranges of ``box`` in a row-major tensor that starts at byte ``start``.

    Example:
        >>> list(byte_ranges_of((4, 8), Box((1, 2), (2, 3)), itemsize=4).offsets())
        [40, 72]
    """
    return _byte_ranges_of(shape, box, itemsize).shifted(start)


# As many tensors are alike, most of the work has been done before.
@lru_cache(maxsize=4096)
def _byte_ranges_of(shape: tuple[int, ...], box: Box, itemsize: int) -> ByteRanges:
    if not box.numel:
        return ByteRanges(0, 0)
    start, nbytes, stride = 0, itemsize, itemsize
    loops: list[tuple[int, int]] = []
    for size, offset, count in zip(
        reversed(shape), reversed(box.offset), reversed(box.shape), strict=True
    ):
        start += offset * stride
        if count > 1:
            # While the dims inside are whole, ranges of this one touch and are one longer range;
            # and a loop over all of a dim goes on where the next turn of the loop outside starts.
            if not loops and stride == nbytes:
                nbytes *= count
            elif loops and loops[-1][0] * loops[-1][1] == stride:
                loops[-1] = (loops[-1][0] * count, loops[-1][1])
            else:
                loops.append((count, stride))
        stride *= size
    loops.reverse()
    return ByteRanges(
        start, nbytes, tuple(loop[0] for loop in loops), tuple(loop[1] for loop in loops)
    )


def within(inner: Box, outer: Box) -> Box:
    """Return the elements of ``inner`` as counted from the first of ``outer``."""
    offset = tuple(a - b for a, b in zip(inner.offset, outer.offset, strict=True))
    return Box(offset, inner.shape)
