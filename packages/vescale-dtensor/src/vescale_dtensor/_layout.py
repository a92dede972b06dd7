"""Which boxes of a global tensor does a mesh coordinate hold? Integers only.

No process group, no device and no tensor data: everything here can be tested exhaustively.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ._placements import InterleavedShard, RaggedShard


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

    Attributes:
        box: The elements held, in global coordinates.
        local_offset: First element of the box in the local tensor.
    """

    box: Box
    local_offset: tuple[int, ...]

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of the local tensor."""
        return Box(self.local_offset, self.box.shape).slices


# One dim of a local tensor, as consecutive runs of global indices: (start, length).
_Runs = list[tuple[int, int]]


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
        placements: One placement per mesh axis, outermost first.

    Returns:
        The boxes in the order of the local tensor; none if the rank holds nothing.

    Raises:
        ValueError: If ``placements`` and ``mesh_shape`` differ in length, a placement names
            a tensor dim that ``shape`` does not have, or does not fit the mesh axis.
        TypeError: If a placement is of an unknown class.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> local_boxes((10, 4), mesh_shape=(4,), coordinate=(3,), placements=(Shard(0),))
        (LocalBox(box=Box(offset=(9, 0), shape=(1, 4)), local_offset=(0, 0)),)
    """
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise ValueError(
            f"expected one placement and one coordinate per mesh axis ({len(mesh_shape)}), "
            f"got {tuple(placements)} and {tuple(coordinate)}"
        )
    runs: list[_Runs] = [[(0, size)] for size in shape]
    # A scalar has no dim to cut; a ragged placement can still give it to one rank only.
    scalar: _Runs = [(0, 1)]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate | Partial):
            continue
        dim = _sharded_dim(placement, shape, axis)
        held = scalar if dim is None else runs[dim]
        held[:] = _split(held, placement, mesh_shape[axis], coordinate[axis])
    if not scalar:
        return ()
    return _boxes_of(runs)


def local_shape(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[int, ...]:
    """Return the shape of the local tensor that holds :func:`local_boxes`.

    A rank that holds nothing of a scalar has local shape ``(0,)``.
    """
    sizes = list(shape)
    runs: list[_Runs] = [[(0, size)] for size in shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate | Partial):
            continue
        dim = _sharded_dim(placement, shape, axis)
        if dim is None:
            if not _split([(0, 1)], placement, mesh_shape[axis], coordinate[axis]):
                return (0,)
            continue
        runs[dim] = _split(runs[dim], placement, mesh_shape[axis], coordinate[axis])
        sizes[dim] = sum(length for _, length in runs[dim])
    return tuple(sizes)


def _sharded_dim(placement: Placement, shape: Sequence[int], axis: int) -> int | None:
    """Return the tensor dim that ``placement`` cuts, None for a scalar held by one rank."""
    if not isinstance(placement, Shard | InterleavedShard | RaggedShard):
        raise TypeError(f"unsupported placement {placement!r} on mesh axis {axis}")
    dim = placement.dim
    if isinstance(placement, RaggedShard) and not shape:
        return None
    if not 0 <= dim < len(shape):
        raise ValueError(
            f"{placement!r} on mesh axis {axis} names tensor dim {dim}, "
            f"but the tensor has shape {tuple(shape)}"
        )
    return dim


def _split(runs: _Runs, placement: Placement, num_ranks: int, index: int) -> _Runs:
    """Return the part of ``runs`` that rank ``index`` of a mesh axis holds."""
    length = sum(n for _, n in runs)
    match placement:
        case RaggedShard(local_units=units, granularity=granularity):
            if len(units) != num_ranks:
                raise ValueError(
                    f"{placement!r} has units for {len(units)} ranks, "
                    f"but the mesh axis has {num_ranks}"
                )
            if granularity * sum(units) < length:
                raise ValueError(
                    f"{placement!r} covers {granularity * sum(units)} indices, "
                    f"but the tensor dim has {length}"
                )
            start = granularity * sum(units[:index])
            return _cut(runs, start, start + granularity * units[index])
        case InterleavedShard(parts=parts):
            if length % (parts * num_ranks):
                raise ValueError(
                    f"{placement!r} over {num_ranks} ranks needs a tensor dim that is a "
                    f"multiple of {parts * num_ranks}, got {length}"
                )
            part, chunk = length // parts, length // (parts * num_ranks)
            starts = (k * part + index * chunk for k in range(parts))
            return [run for start in starts for run in _cut(runs, start, start + chunk)]
        case _:
            chunk = -(-length // num_ranks)  # ceil division, as in torch.chunk
            return _cut(runs, chunk * index, chunk * (index + 1))


def _cut(runs: _Runs, lower: int, upper: int) -> _Runs:
    """Return positions ``lower`` to ``upper`` of the concatenated runs, as runs."""
    result: _Runs = []
    position = 0
    for start, length in runs:
        low, high = max(lower, position), min(upper, position + length)
        if low < high:
            result.append((start + low - position, high - low))
        position += length
    return result


def _boxes_of(runs: list[_Runs]) -> tuple[LocalBox, ...]:
    """Return the product of the runs of every dim, with their local positions."""
    boxes = [LocalBox(Box((), ()), ())]
    for dim_runs in runs:
        extended: list[LocalBox] = []
        for held in boxes:
            position = 0
            for start, length in dim_runs:
                box = Box((*held.box.offset, start), (*held.box.shape, length))
                extended.append(LocalBox(box, (*held.local_offset, position)))
                position += length
        boxes = extended
    return tuple(boxes)
