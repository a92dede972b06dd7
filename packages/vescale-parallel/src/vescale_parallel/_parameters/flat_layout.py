"""Where parameters are in one flat buffer that ranks hold equal ranges of: integers only.

[Note: flat buffers] Rank r holds elements r * shard to (r + 1) * shard of a buffer in which whole
parameters follow one another. What is gathered is the buffer, and a parameter is a view of it:
nothing is copied before or after. A parameter may be cut between its units only, so padding is put
between parameters where a range would end inside of a unit (Wang et al. 2026, veScale-FSDP).

Units are rows where that pads little, for then a shard has the dims of the parameter, and finer
where it would pad much, down to elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate

from vescale_dtensor import RaggedShard

# What NCCL moves fastest is aligned to this, in bytes.
_ALIGNMENT = 128
# Vector loads and stores of kernels are, in bytes.
_START_ALIGNMENT = 16
# Padding that is worth a coarser unit: of all elements.
_MAX_PADDING = 0.005
_MAX_TRIES = 256


@dataclass(frozen=True, slots=True)
class Unit:
    """What one rank holds whole.

    Attributes:
        num_dims: The leading dims that are cut as one.
        length: Indices of these in a unit.
        numel: Elements in it.
    """

    num_dims: int
    length: int
    numel: int


@dataclass(frozen=True, slots=True)
class FlatShape:
    """A parameter of a flat buffer.

    Attributes:
        sizes: Its shape, no scalar's; with tensor parallelism that of the largest part.
        is_flattened: Whether all dims are cut as one, in any case: parts of other ranks have
            shorter rows, and an element has to be on one rank in all of them.
        block: Elements that follow each other and are on one rank, from the first on: those that
            an optimizer quantises together.
    """

    sizes: tuple[int, ...]
    is_flattened: bool = False
    block: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def units(self) -> Iterator[Unit]:
        """Yield the units it may be cut into, the largest first."""
        units = dict.fromkeys(map(self._of_blocks, self._units()))
        yield from sorted(units, key=lambda unit: -unit.numel)

    def _of_blocks(self, unit: Unit) -> Unit:
        """Return so many units that no block is cut."""
        times = self.block // math.gcd(unit.numel, self.block)
        return Unit(unit.num_dims, times * unit.length, times * unit.numel)

    def _units(self) -> Iterator[Unit]:
        sizes, ndim = self.sizes, len(self.sizes)
        for num_dims in range(1, ndim):
            numel = math.prod(sizes[num_dims:])
            if numel and not self.is_flattened:
                yield Unit(num_dims, 1, numel)
        length = sizes[-1] if ndim > 1 else 0
        while length and length % 2 == 0:
            length //= 2
            yield Unit(ndim, length, length)
        yield Unit(ndim, 1, 1)


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Where parameters are in a flat buffer. There is one of each, see :func:`flat_layout`.

    Attributes:
        shapes: The parameters, in order.
        units: Those that each is cut into.
        starts: The element where each begins.
        ranks: How many ranges there are.
        shard: Elements of a range.
    """

    shapes: tuple[FlatShape, ...]
    units: tuple[Unit, ...]
    starts: tuple[int, ...]
    ranks: int
    shard: int

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.ranks * self.shard

    def placement(self, index: int) -> Placement:
        """Return how ranks hold a parameter."""
        unit, shape = self.units[index], self.shapes[index]
        counts = [
            -(-(high - low) // unit.numel)  # the last one may be shorter
            for low, high in (self._range(index, rank, shape.numel) for rank in range(self.ranks))
        ]
        if not any(counts):  # of an empty parameter somebody has to have nothing
            counts[0] = 1
        if self.ranks == 1:
            return Replicate()
        return RaggedShard(tuple(range(unit.num_dims)), unit.length, tuple(counts))

    def in_shard(self, index: int, rank: int, numel: int) -> slice:
        """Return where a rank's range has a parameter, whose part here has ``numel`` elements."""
        low, high = self._range(index, rank, numel)
        start = self.starts[index] + low - rank * self.shard if high > low else 0
        return slice(start, start + high - low)

    def in_whole(self, index: int, numel: int) -> slice:
        """Return where a parameter is, whose part here has ``numel`` elements."""
        return slice(self.starts[index], self.starts[index] + numel)

    def _range(self, index: int, rank: int, numel: int) -> tuple[int, int]:
        """Return the elements of a parameter that a rank has, as (low, high)."""
        first = rank * self.shard - self.starts[index]
        low = min(max(first, 0), numel)
        return low, min(max(first + self.shard, 0), numel)


@functools.lru_cache(maxsize=1 << 12)
def flat_layout(
    shapes: tuple[FlatShape, ...], ranks: int, itemsize: int, multiple: int = 1
) -> FlatLayout:
    """Return the layout whose ranges are shortest, with units as large as ``_MAX_PADDING`` allows.

    Args:
        shapes: The parameters, in order.
        ranks: How many ranks hold a range.
        itemsize: Bytes of an element.
        multiple: A range has a multiple of so many elements, and of 128 bytes.
    """
    align = math.lcm(max(_ALIGNMENT // itemsize, 1), multiple)
    least = max(-(-sum(_aligned(s.numel, itemsize) for s in shapes) // ranks), 1)
    least = _round_up(least, align)
    limits, padding = _limits(shapes), _MAX_PADDING
    while True:
        most = math.floor(least * (1 + padding))
        for limit in limits:
            units = tuple(_coarsest(shape, limit) for shape in shapes)
            found = _shortest(shapes, units, ranks, itemsize, range(least, most + 1, align))
            if found is not None:
                return found
        # Elements fit into any range; blocks of a small model into longer ones.
        limits, padding = limits[-1:], 2 * padding


def _limits(shapes: Sequence[FlatShape]) -> list[int]:
    """Return sizes that units may have at most, descending; elements come last."""
    sizes = {unit.numel for shape in shapes for unit in shape.units()}
    finest = max(min(unit.numel for unit in shape.units()) for shape in shapes)
    return sorted({size for size in sizes if size >= finest}, reverse=True)


def _coarsest(shape: FlatShape, limit: int) -> Unit:
    return next(unit for unit in shape.units() if unit.numel <= limit)


def _shortest(
    shapes: tuple[FlatShape, ...],
    units: tuple[Unit, ...],
    ranks: int,
    itemsize: int,
    lengths: range,
) -> FlatLayout | None:
    """Return the layout with the shortest range of these lengths, None if none is found.

    What does not fit is tried again with ranges that are longer by what was over.
    """
    # A parameter that is cut twice has whole units in the range between.
    cut_twice = [
        unit.numel
        for shape, unit in zip(shapes, units, strict=True)
        if shape.numel > 2 * lengths[-1]
    ]
    step = math.lcm(lengths.step, *cut_twice)
    shard, leap = _round_up(lengths.start, step), len(lengths) // _MAX_TRIES + 1
    while shard <= lengths[-1]:
        starts = _starts(shapes, units, shard, itemsize)
        if starts is None:
            shard += _round_up(leap * lengths.step, step)
            continue
        over = starts[-1] + shapes[-1].numel - ranks * shard
        if over <= 0:
            return FlatLayout(shapes, units, tuple(starts), ranks, shard)
        shard += _round_up(-(-over // ranks), step)
    return None


def _starts(
    shapes: Sequence[FlatShape], units: Sequence[Unit], shard: int, itemsize: int
) -> list[int] | None:
    """Return where every parameter begins, as early as it can; None if one cannot.

    The earliest is best: whatever the next ones can do behind a later one, they can do behind it.
    """
    position, starts = 0, list[int]()
    for shape, unit in zip(shapes, units, strict=True):
        start = _start(position, shape.numel, unit.numel, shard, itemsize)
        if start is None:
            return None
        starts.append(start)
        position = start + shape.numel
    return starts


def _start(position: int, numel: int, unit: int, shard: int, itemsize: int) -> int | None:
    """Return where a parameter can begin at ``position`` or after it, so that no unit is cut."""
    align = max(_START_ALIGNMENT // itemsize, 1)
    first = _round_up(position + 1, shard)
    for border in (first, first + shard):
        start = _round_up(max(position, border - shard), align)
        if start + numel <= border:
            return start
        start = _congruent(start, align, border, unit)
        is_cut_twice = start + numel > border + shard
        if start < border and not (is_cut_twice and shard % unit):
            return start
    return None


def _congruent(start: int, align: int, border: int, unit: int) -> int:
    """Return the first multiple of ``align`` from ``start`` on, whole units before ``border``.

    A border is a multiple of ``align``, so there is one.
    """
    common = math.gcd(align, unit)
    period = unit // common
    times = border // common * pow(align // common, -1, period) % period if period > 1 else 0
    first = -(-start // align)
    return (first + (times - first) % period) * align


def _aligned(numel: int, itemsize: int) -> int:
    return _round_up(numel, max(_START_ALIGNMENT // itemsize, 1))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
