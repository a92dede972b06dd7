"""One step of a redistribution: who sends which elements to whom. Integers only.

A step is described by where elements are before and after it. What one rank sends and
receives follows from that, and is worked out for that rank and its group alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from torch import Tensor

from vescale_dtensor._layout.boxes import Box, DimCut, LocalBox, LocalShard, local_shard
from vescale_dtensor._layout.placements import ReduceOp

from .element_counts import Coordinate, peers_of_coordinate

TransferKind = Literal["local", "all_gather", "all_to_all"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfer:
    """Every rank gets the elements of its target that it lacks, from the ranks of its group.

    Attributes:
        kind: The collective; ``local`` if nothing needs to be sent.
        axes: The mesh axes that act as one group, ascending.
        shape: Global shape, of one dim at least.
        mesh_shape: Ranks along each mesh axis.
        source: Where elements are before the step.
        target: Where they are after it.
        reduce_op: How the values that the ranks of the group have for one element become
            one, in rank order. None if one rank of the group has it.
        embeds: Whether elements that no rank of the group has become the identity of a sum.
    """

    kind: TransferKind
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    source: tuple[DimCut, ...]
    target: tuple[DimCut, ...]
    reduce_op: ReduceOp | None = None
    embeds: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks in a group."""
        return math.prod(self.mesh_shape[axis] for axis in self.axes)

    def numel_received(self, coordinate: Coordinate) -> int:
        """Return how many elements a rank receives from others."""
        send_recv = send_recv_of(self, coordinate)
        others = [pieces for i, pieces in enumerate(send_recv.receives) if i != send_recv.own]
        return sum(piece.numel for pieces in others for piece in pieces)

    def describe(self, axis_names: Sequence[str] | None = None) -> str:
        """Return the step in words, with what the first rank receives."""
        if self.kind == "local":
            return "embed in zeros, locally" if self.embeds else "cut locally"
        names = axis_names or [f"axis {axis}" for axis in range(len(self.mesh_shape))]
        over = " and ".join(names[axis] for axis in self.axes)
        what = self.kind.replace("_", "-")
        if self.reduce_op and self.kind == "all_to_all":
            what = f"reduce-scatter ({self.reduce_op})"
        elif self.reduce_op:
            what = f"all-gather and {self.reduce_op}"
        return f"{what} over {over}, {self.numel_received((0,) * len(self.mesh_shape))} elements"


@dataclass(frozen=True, eq=False, kw_only=True)
class Mask:
    """Ranks along some axes replace their copy by the identity of a pending reduction.

    Attributes:
        fills: Per mesh axis, the reduction whose identity ranks after the first get.
        sums: Mesh axes on which a sum is pending after the step.
        axes: None, nothing is sent.
    """

    fills: tuple[tuple[int, Literal["sum", "product"]], ...]
    sums: tuple[int, ...]
    axes: tuple[int, ...] = ()

    def fill_at(self, coordinate: Coordinate) -> Literal["sum", "product"] | None:
        """Return whose identity a rank gets; None if it keeps its value.

        Pending reductions run from the innermost axis outward. A factor of one under a
        pending sum on an inner axis is a one on the first rank of it and zeros on the others.
        """
        for axis, reduce_op in reversed(self.fills):
            if coordinate[axis]:
                under_sum = any(coordinate[inner] for inner in self.sums if inner > axis)
                return "sum" if under_sum else reduce_op
        return None

    def numel_received(self, coordinate: Coordinate) -> int:
        """Return 0."""
        return 0

    def describe(self, axis_names: Sequence[str] | None = None) -> str:
        """Return the step in words."""
        names = axis_names or [f"axis {axis}" for axis in range(1 + max(a for a, _ in self.fills))]
        over = " and ".join(names[axis] for axis, _ in self.fills)
        return f"keep the value on the first rank along {over}"


Step = Transfer | Mask


@dataclass(frozen=True, slots=True)
class Piece:
    """A box as it sits in a local tensor, possibly in a flattened dim of it.

    Attributes:
        numel: Number of elements.
        outer: The index that cuts the surrounding box out of the local tensor.
        unflattened: Shape of the surrounding box; None if ``outer`` is all there is to do.
        inner: The index that cuts this box out of the surrounding one.
        span: First and last+1 position in the flat local tensor, if the box fills that.
    """

    numel: int
    outer: tuple[slice, ...]
    unflattened: tuple[int, ...] | None
    inner: tuple[slice, ...]
    span: tuple[int, int] | None

    def of(self, local: Tensor) -> Tensor:
        """Return a view of this piece in ``local``."""
        view = local[self.outer]
        return view if self.unflattened is None else view.view(self.unflattened)[self.inner]


@dataclass(frozen=True, slots=True)
class SendRecv:
    """What one rank does in a step.

    Attributes:
        own: The rank's place in its group.
        sends: Per rank of the group, the pieces of this rank's local tensor that it needs.
        receives: Per rank of the group, where the pieces that come from it go.
        numels: Per rank of the group, how many elements come from it.
        gathers: Per rank of the group, the pieces of its local tensor that are wanted, where
            it sends all of it as it is: in an all-gather. Empty otherwise.
        source_shapes: Per rank of the group, the shape of that local tensor.
        shape: Shape of this rank's local tensor after the step.
        stack_dim: The dim along which what is received, in order, makes up the new local
            tensor: -1 if it does so flat, None if it does not.
    """

    own: int
    sends: tuple[tuple[Piece, ...], ...]
    receives: tuple[tuple[Piece, ...], ...]
    numels: tuple[int, ...]
    gathers: tuple[tuple[Piece, ...], ...]
    source_shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    stack_dim: int | None


@lru_cache(maxsize=16384)
def send_recv_of(step: Transfer, coordinate: Coordinate) -> SendRecv:
    """Return what the rank at ``coordinate`` does in ``step``; looks at its group alone."""
    group = peers_of_coordinate(step.mesh_shape, coordinate, step.axes)
    own = group.index(coordinate)
    mine, wanted = _before(step, coordinate), _after(step, coordinate)
    to_own = _pieces(mine, wanted)
    gathering = step.kind == "all_gather"
    # In a reduction all ranks of a group hold the same boxes, in an all-gather all want them.
    arriving = [
        to_own if step.reduce_op or place == own else _pieces(_before(step, peer), wanted)
        for place, peer in enumerate(group)
    ]
    leaving = [
        to_own if gathering or place == own else _pieces(mine, _after(step, peer))
        for place, peer in enumerate(group)
    ]
    receives = tuple(tuple(target for _, target in pairs) for pairs in arriving)
    gathers = tuple(tuple(source for source, _ in pairs) for pairs in arriving if gathering)
    return SendRecv(
        own=own,
        sends=tuple(tuple(source for source, _ in pairs) for pairs in leaving),
        receives=receives,
        numels=tuple(sum(piece.numel for piece in pieces) for pieces in receives),
        gathers=gathers,
        source_shapes=tuple(_before(step, peer).shape for peer in group if gathering),
        shape=wanted.shape,
        stack_dim=_stack_dim(receives[:1] if step.reduce_op else receives, gathers, wanted.shape),
    )


@lru_cache(maxsize=65536)
def _before(step: Transfer, coordinate: Coordinate) -> LocalShard:
    return local_shard(step.shape, step.mesh_shape, coordinate, step.source)


@lru_cache(maxsize=65536)
def _after(step: Transfer, coordinate: Coordinate) -> LocalShard:
    return local_shard(step.shape, step.mesh_shape, coordinate, step.target)


def _pieces(source: LocalShard, target: LocalShard) -> list[tuple[Piece, Piece]]:
    """Return what both hold, as it sits in either local tensor, in the order of the target."""
    found: list[tuple[Piece, Piece]] = []
    for wanted in target.boxes:
        for held in source.boxes:
            box = wanted.box.intersect(held.box)
            if box is not None and box.numel:
                found.append((_piece(held, box, source.shape), _piece(wanted, box, target.shape)))
    return found


def _piece(held: LocalBox, box: Box, local_shape: tuple[int, ...]) -> Piece:
    relative = tuple(b - o for b, o in zip(box.offset, held.box.offset, strict=True))
    inner = Box(relative, box.shape).slices
    if held.flattened_shape is None:
        offset = tuple(o + r for o, r in zip(held.local_offset, relative, strict=True))
        span = _span(offset, box.shape, local_shape)
        return Piece(box.numel, Box(offset, box.shape).slices, None, (), span)
    span = None
    if box == held.box:
        span = _span(held.local_offset, held.flattened_shape, local_shape)
    return Piece(box.numel, held.local_slices, held.box.shape, inner, span)


def _span(
    offset: tuple[int, ...], shape: tuple[int, ...], local_shape: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return the flat range that a box fills in a local tensor, None if it has gaps."""
    start, step, whole = 0, 1, True
    for o, s, size in zip(reversed(offset), reversed(shape), reversed(local_shape), strict=True):
        if s != 1 and not whole:
            return None
        whole = whole and s == size
        start += o * step
        step *= size
    return start, start + math.prod(shape)


def _stack_dim(
    receives: Sequence[Sequence[Piece]],
    gathers: Sequence[Sequence[Piece]],
    shape: tuple[int, ...],
) -> int | None:
    if all(map(_fills_in_order, gathers)):
        flat = [piece for pieces in receives for piece in pieces]
        if _fills_in_order(flat) and sum(piece.numel for piece in flat) == math.prod(shape):
            return -1
        for dim in range(len(shape)):
            if _stacks_along(dim, receives, shape):
                return dim
    return None


def _fills_in_order(pieces: Sequence[Piece]) -> bool:
    """Whether pieces lie in a local tensor one after the other, from its start."""
    position = 0
    for piece in pieces:
        if piece.span is None or piece.span[0] != position:
            return False
        position = piece.span[1]
    return True


def _stacks_along(dim: int, receives: Sequence[Sequence[Piece]], shape: tuple[int, ...]) -> bool:
    """Whether every rank sends one box at most, and these tile ``shape`` along ``dim``."""
    position = 0
    for pieces in receives:
        if not pieces:
            continue
        if len(pieces) > 1 or pieces[0].unflattened is not None:
            return False
        for other, index in enumerate(pieces[0].outer):
            if other != dim and (index.start, index.stop) != (0, shape[other]):
                return False
        if pieces[0].outer[dim].start != position:
            return False
        position = pieces[0].outer[dim].stop
    return position == shape[dim]
