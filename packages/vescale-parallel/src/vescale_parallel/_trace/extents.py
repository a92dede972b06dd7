"""Which ranges of a dim of one device's tensor a rank has. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Extent:
    """What of a dim of one device's tensor a rank has.

    Attributes:
        length: Of the whole dim.
        ranges: In the order in which the rank holds them.
    """

    length: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def here(self) -> int:
        """How long the dim is on the rank."""
        return sum(end - first for first, end in self.ranges)

    def repeated(self, count: int) -> Extent:
        """Return that of a dim in which this one is inside of another of length ``count``."""
        ranges = (
            (of * self.length + first, of * self.length + end)
            for of in range(count)
            for first, end in self.ranges
        )
        return Extent(count * self.length, tuple(ranges))

    def within(self, first: int, end: int) -> Extent:
        """Return what is from one place to another of what the rank holds."""
        cut = (
            (begin + max(first - here, 0), min(stop, begin + end - here))
            for here, begin, stop in self.pieces()
        )
        return Extent(self.length, tuple(each for each in cut if each[0] < each[1]))

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Return where each range begins on the rank, and begins and ends in the whole."""
        here = 0
        for first, end in self.ranges:
            yield here, first, end
            here += end - first
