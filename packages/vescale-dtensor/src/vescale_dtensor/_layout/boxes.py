"""Which boxes of a global tensor does a mesh coordinate hold? Integers only.

No process group, no device and no tensor data: everything here can be tested exhaustively.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor._torch_private import StridedShard

from .placements import InterleavedShard, RaggedShard


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open hyper-rectangle of a global tensor, in elements.

    Attributes:
        offset: First element along each tensor dim.
        shape: Number of elements along each tensor dim, all at least one unless the
            tensor itself is empty there.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return what both boxes hold, or None if they share no element."""
        lower = tuple(map(max, self.offset, other.offset))
        upper = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(low >= high for low, high in zip(lower, upper, strict=True)):
            return None
        return Box(lower, tuple(h - low for low, h in zip(lower, upper, strict=True)))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class LocalBox:
    """One box of the global tensor and where it sits in the rank's local tensor.

    :meth:`of` works for every placement; ``local_slices`` alone is enough where no placement
    flattens dims.

    Attributes:
        box: The elements held, in global coordinates.
        local_offset: First element of the box in the local tensor.
        flattened_shape: Shape of the box in a local tensor with flattened dims; None where
            it is ``box.shape``.
    """

    box: Box
    local_offset: tuple[int, ...]
    flattened_shape: tuple[int, ...] | None = None

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of the local tensor."""
        return Box(self.local_offset, self.flattened_shape or self.box.shape).slices

    def of(self, local: Tensor) -> Tensor:
        """Return a view of this box in ``local``, in the shape of the box."""
        held = local[self.local_slices]
        return held if self.flattened_shape is None else held.view(self.box.shape)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Consecutive tensor dims, flattened and cut as ``torch.chunk`` cuts: ``Shard`` of any run."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DimCut:
    """One cut of a tensor, over one mesh axis or several that act as one.

    Attributes:
        axes: The mesh axes, ascending, the last one varying fastest.
        rule: What is cut, and how.
    """

    axes: tuple[int, ...]
    rule: Placement | Chunks


def local_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[LocalBox, ...]:
    """Return the boxes of a global tensor that one mesh coordinate holds.

    Mesh axes are applied outermost first, so two placements on one tensor dim nest. The
    boxes of all coordinates that differ in a sharding axis tile the tensor exactly once;
    the local tensor is the boxes put together again.

    Args:
        shape: Global tensor shape.
        mesh_shape: Number of ranks along each mesh axis.
        coordinate: This rank's index along each mesh axis.
        placements: One placement per mesh axis, outermost first. ``Partial`` counts as
            ``Replicate``: every rank has a value for every element.

    Returns:
        The boxes in the order of the local tensor; none if the rank holds nothing.

    Raises:
        ValueError: If ``placements`` and ``mesh_shape`` differ in length, a placement names
            a tensor dim that ``shape`` does not have, or does not fit the mesh axis.
        TypeError: If a placement is of an unknown class.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> (held,) = local_boxes((10, 4), (4,), coordinate=(3,), placements=(Shard(0),))
        >>> held.box, held.local_offset
        (Box(offset=(9, 0), shape=(1, 4)), (0, 0))
    """
    cuts = cuts_of(mesh_shape, coordinate, placements)
    strips = _held_strips(shape, mesh_shape, coordinate, cuts)
    if shape:
        return _boxes_of(strips)
    return (LocalBox(Box((), ()), ()),) if strips[0].pieces else ()


def local_shape(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[int, ...]:
    """Return the shape of the local tensor that holds :func:`local_boxes`.

    A rank that holds nothing of a scalar has local shape ``(0,)``.
    """
    return _local_shape(tuple(shape), tuple(mesh_shape), tuple(coordinate), tuple(placements))


# Every gradient is checked against it at every step.
@lru_cache(maxsize=1 << 14)
def _local_shape(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[int, ...]:
    cuts = cuts_of(mesh_shape, coordinate, placements)
    strips = _held_strips(shape, mesh_shape, coordinate, cuts)
    sizes = tuple(strip.numel for strip in strips)
    return () if sizes == (1,) and not shape else sizes


def cuts_of(
    mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[DimCut, ...]:
    """Return the placements that cut, outermost first."""
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise ValueError(
            f"expected one placement and one coordinate per mesh axis ({len(mesh_shape)}), "
            f"got {tuple(placements)} and {tuple(coordinate)}"
        )
    return tuple(
        DimCut((axis,), placement)
        for axis, placement in enumerate(placements)
        if not isinstance(placement, Replicate | Partial)
    )


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A rank's local tensor: its shape, and the boxes that it is made of."""

    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]


def local_shard(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    cuts: Sequence[DimCut],
) -> LocalShard:
    """Return what a rank holds after cuts over axes in any order; not of a scalar."""
    strips = _held_strips(shape, mesh_shape, coordinate, cuts)
    return LocalShard(tuple(strip.numel for strip in strips), _boxes_of(strips))


# Elements of consecutive tensor dims, as (offset, shape); a strip has them in C order.
_Piece = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class _Strip:
    """One dim of a local tensor: the tensor dims that it spans, and what it holds of them."""

    first_dim: int
    num_dims: int
    pieces: list[_Piece]

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.pieces)


def _held_strips(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    cuts: Sequence[DimCut],
) -> list[_Strip]:
    # A scalar has no dim to cut; a ragged placement can still give it to one rank only.
    strips = [_Strip(dim, 1, [((0,), (size,))]) for dim, size in enumerate(shape or (1,))]
    for cut in cuts:
        num_ranks, index = 1, 0
        for axis in cut.axes:
            num_ranks, index = num_ranks * mesh_shape[axis], index * mesh_shape[axis]
            index += coordinate[axis]
        dims = dims_of(cut)
        if (not shape and not isinstance(cut.rule, RaggedShard)) or dims[-1] >= (len(shape) or 1):
            raise ValueError(
                f"{cut.rule!r} on mesh axis {cut.axes[0]} names tensor dim {dims[-1]}, "
                f"but the tensor has shape {tuple(shape)}"
            )
        strip = _strip_over(strips, dims, cut)
        ranges = _ranges(cut.rule, strip.numel, num_ranks, index)
        strip.pieces = [piece for low, high in ranges for piece in _cut(strip.pieces, low, high)]
    return strips


def dims_of(cut: DimCut) -> tuple[int, ...]:
    """Return the tensor dims that a cut goes through."""
    match cut.rule:
        case Chunks(dims=dims):
            return dims
        case Shard(dim=dim) | InterleavedShard(dim=dim) | StridedShard(dim=dim):
            return (dim,)
        case RaggedShard(dims=dims):
            return dims
        case _:
            raise TypeError(f"unsupported placement {cut.rule!r} on mesh axis {cut.axes[0]}")


def _strip_over(strips: list[_Strip], dims: tuple[int, ...], cut: DimCut) -> _Strip:
    """Return the strip that spans ``dims``, joining the strips of single dims if need be."""
    inside = [s for s in strips if s.first_dim <= dims[-1] and dims[0] < s.first_dim + s.num_dims]
    if sum(strip.num_dims for strip in inside) != len(dims):
        raise ValueError(
            f"{cut.rule!r} on mesh axis {cut.axes[0]} cuts dims {dims}, but a placement on an "
            "outer mesh axis has flattened some of them with others"
        )
    joined = inside[0]
    for strip in inside[1:]:
        joined.pieces = _joined_pieces(joined.pieces, strip.pieces)
        joined.num_dims += strip.num_dims
        strips.remove(strip)
    return joined


def _joined_pieces(outer: list[_Piece], inner: list[_Piece]) -> list[_Piece]:
    """Return the product of two strips in C order."""
    if len(inner) > 1:  # every index of the outer strip meets all inner pieces in turn
        outer = [
            (index, (1,) * len(index))
            for offset, shape in outer
            for index in product(*(range(o, o + s) for o, s in zip(offset, shape, strict=True)))
        ]
    return [(o + p, s + t) for o, s in outer for p, t in inner]


def _ranges(
    rule: Placement | Chunks, length: int, num_ranks: int, index: int
) -> list[tuple[int, int]]:
    """Return the positions of a strip that rank ``index`` holds, as (lower, upper)."""
    match rule:
        case Chunks() | Shard():
            return _chunk_of_each((length,), num_ranks, index)
        case StridedShard(split_factor=split_factor):
            part = -(-length // int(split_factor))
            starts = range(0, length, part or 1)
            lengths = [min(part, length - start) for start in starts]
            return _chunk_of_each(lengths, num_ranks, index)
        case InterleavedShard():
            return _chunk_of_each(rule.lengths(length), num_ranks, index)
        case RaggedShard(local_units=units, granularity=granularity):
            if len(units) != num_ranks:
                raise ValueError(
                    f"{rule!r} has units for {len(units)} ranks, but the mesh axis has {num_ranks}"
                )
            if granularity * sum(units) < length:
                raise ValueError(
                    f"{rule!r} covers {granularity * sum(units)} indices, "
                    f"but the tensor dim has {length}"
                )
            start = granularity * sum(units[:index])
            return [(start, start + granularity * units[index])]
        case _:
            raise AssertionError(f"dims_of has let {rule!r} pass")


def _chunk_of_each(lengths: Sequence[int], num_ranks: int, index: int) -> list[tuple[int, int]]:
    """Return chunk ``index`` of each of consecutive parts, as ``torch.chunk`` cuts them."""
    found: list[tuple[int, int]] = []
    start = 0
    for length in lengths:
        stop = start + length
        chunk = -(-length // num_ranks)
        lower = start + index * chunk
        if lower < stop:
            found.append((lower, min(lower + chunk, stop)))
        start = stop
    return found


def _cut(pieces: list[_Piece], lower: int, upper: int) -> Iterator[_Piece]:
    """Yield positions ``lower`` to ``upper`` of the concatenated pieces."""
    position = 0
    for offset, shape in pieces:
        numel = math.prod(shape)
        low, high = max(lower - position, 0), min(upper - position, numel)
        if low < high:
            yield from _run(offset, shape, low, high)
        position += numel


def _run(offset: tuple[int, ...], shape: tuple[int, ...], low: int, high: int) -> Iterator[_Piece]:
    """Yield positions ``low`` to ``high`` of a piece in C order: head, body and tail a level."""
    inner = math.prod(shape[1:])
    if inner == 1 or (low % inner == 0 and high % inner == 0):
        yield (offset[0] + low // inner, *offset[1:]), ((high - low) // inner, *shape[1:])
        return
    first, last = -(-low // inner), high // inner  # the whole rows are first..last
    if low < first * inner:
        row = low // inner
        stop = min(high, first * inner)
        for o, s in _run(offset[1:], shape[1:], low - row * inner, stop - row * inner):
            yield (offset[0] + row, *o), (1, *s)
    if first < last:
        yield (offset[0] + first, *offset[1:]), (last - first, *shape[1:])
    if first <= last and last * inner < high:
        for o, s in _run(offset[1:], shape[1:], 0, high - last * inner):
            yield (offset[0] + last, *o), (1, *s)


def _boxes_of(strips: list[_Strip]) -> tuple[LocalBox, ...]:
    """Return the product of the pieces of every strip, with their local positions."""
    flattened = any(strip.num_dims > 1 for strip in strips)
    found = [LocalBox(Box((), ()), (), () if flattened else None)]
    for strip in strips:
        extended: list[LocalBox] = []
        for held in found:
            position = 0
            for offset, shape in strip.pieces:
                numel = math.prod(shape)
                box = Box(held.box.offset + offset, held.box.shape + shape)
                run = None if held.flattened_shape is None else (*held.flattened_shape, numel)
                extended.append(LocalBox(box, (*held.local_offset, position), run))
                position += numel
        found = extended
    return tuple(found)
