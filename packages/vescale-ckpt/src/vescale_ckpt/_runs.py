"""Where the elements of a box lie in a file that holds the whole tensor, row by row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from vescale_dtensor import Box

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Runs:
    """Equally long runs of bytes, in the row-major order of a box.

    Attributes:
        offsets: Where each run starts in the file; increasing.
        nbytes: Length of each run.
    """

    offsets: npt.NDArray[np.int64]
    nbytes: int

    @property
    def total_nbytes(self) -> int:
        """Number of bytes in all runs."""
        return len(self.offsets) * self.nbytes

    def locate(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file offset, start, stop) for bytes ``start`` onwards of the packed box.

        ``start`` and ``stop`` of a run are relative to the first byte asked for.
        """
        position = 0
        while position < nbytes:
            run, skipped = divmod(start + position, self.nbytes)
            length = min(self.nbytes - skipped, nbytes - position)
            yield int(self.offsets[run]) + skipped, position, position + length
            position += length

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Divide runs ``first`` to ``last`` where their distance changes.

        Yields:
            The first run, the one after the last, and the distance in bytes.
        """
        steps = np.diff(self.offsets[first:last])
        breaks = first + np.flatnonzero(steps[1:] != steps[:-1]) + 2
        for start, stop in itertools.pairwise([first, *breaks.tolist(), last]):
            yield start, stop, int(steps[start - first]) if stop - start > 1 else self.nbytes

    def bytes_before(self, offset: int) -> int:
        """Return how many bytes of the packed box lie before ``offset`` in the file."""
        started = int(np.searchsorted(self.offsets, offset, side="left"))
        if not started:
            return 0
        within = min(self.nbytes, offset - int(self.offsets[started - 1]))
        return (started - 1) * self.nbytes + within

    def scatter(self, packed: Bytes, start: int, target: Bytes, base: int) -> None:
        """Copy some bytes of the packed box to where they lie in the file.

        Args:
            packed: Bytes of the packed box.
            start: Which byte of the packed box the first of them is.
            target: Consecutive bytes of the file, among them all those.
            base: Where in the file the first byte of ``target`` lies.
        """
        stop = start + len(packed)
        first, last = -(-start // self.nbytes), stop // self.nbytes
        if last <= first:
            for offset, lower, upper in self.locate(start, len(packed)):
                target[offset - base : offset - base + upper - lower] = packed[lower:upper]
            return
        head, tail = first * self.nbytes - start, last * self.nbytes - start
        if head:
            self.scatter(packed[:head], start, target, base)
        for lower, upper, step in self.stretches(first, last):
            rows = packed[lower * self.nbytes - start : upper * self.nbytes - start]
            places = target[int(self.offsets[lower]) - base :]
            as_strided(places, (upper - lower, self.nbytes), (step, 1))[...] = rows.reshape(
                upper - lower, self.nbytes
            )
        if stop > last * self.nbytes:
            self.scatter(packed[tail:], last * self.nbytes, target, base)


def runs_of(shape: Sequence[int], box: Box, itemsize: int, start: int = 0) -> Runs:
    """Return the byte runs of ``box`` in a row-major tensor that starts at byte ``start``.

    Example:
        >>> runs_of((4, 8), Box((1, 2), (2, 3)), itemsize=4).offsets.tolist()
        [40, 72]
    """
    if not box.numel:
        return Runs(np.empty(0, np.int64), itemsize)
    inner = len(shape)
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    # Dims from ``inner`` on are whole; one more dim still makes one consecutive run.
    first = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    offsets = np.array([start], np.int64)
    for dim in range(len(shape)):
        count = box.shape[dim] if dim < first else 1
        steps = (box.offset[dim] + np.arange(count, dtype=np.int64)) * strides[dim]
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    return Runs(offsets, math.prod(box.shape[first:]) * itemsize)
