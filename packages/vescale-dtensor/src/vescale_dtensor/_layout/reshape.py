"""Where is a tensor after its dims were split and flattened? Integers only.

A reshape falls into groups of neighbouring dims that hold the same elements before and after.
Within a group a cut survives if the parts it makes are parts of one dim of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Shard

from .boxes import local_shape
from .layout import Placements
from .placements import InterleavedShard, RaggedShard, is_sharded, on_dim


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring dims that hold the same elements before and after a reshape.

    Attributes:
        before: Dims of the base whose size is not 1.
        after: Dims of the result whose size is not 1.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]


def groups(before: Sequence[int], after: Sequence[int]) -> tuple[Group, ...]:
    """Return the finest groups of dims of two shapes with the same number of elements.

    Example:
        >>> groups((2, 3, 4), (6, 2, 2))
        (Group(before=(0, 1), after=(0,)), Group(before=(2,), after=(1, 2)))
    """
    rest_before = [dim for dim, size in enumerate(before) if size != 1]
    rest_after = [dim for dim, size in enumerate(after) if size != 1]
    found: list[Group] = []
    while rest_before or rest_after:
        own_before, own_after = [rest_before.pop(0)], [rest_after.pop(0)]
        numel_before, numel_after = before[own_before[0]], after[own_after[0]]
        while numel_before != numel_after:
            if numel_before < numel_after:
                own_before.append(rest_before.pop(0))
                numel_before *= before[own_before[-1]]
            else:
                own_after.append(rest_after.pop(0))
                numel_after *= after[own_after[-1]]
        found.append(Group(tuple(own_before), tuple(own_after)))
    return tuple(found)


def reshaped(
    before: Sequence[int],
    after: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Placements,
) -> Placements | None:
    """Return the placements of a tensor of shape ``after`` with the same parts on every rank.

    None if there are none, because some rank's part is no part of the result.
    """
    if not math.prod(before):
        return placements if not any(map(is_sharded, placements)) else None
    result = list(placements)
    by_group: dict[Group, list[int]] = {}
    known = groups(before, after)
    for axis, placement in enumerate(placements):
        if not is_sharded(placement):
            continue
        group = _group_of(known, placement)
        if group is None:
            return None
        by_group.setdefault(group, []).append(axis)
    for group, axes in by_group.items():
        own = _reshape_group(
            [before[dim] for dim in group.before],
            [after[dim] for dim in group.after],
            [mesh_shape[axis] for axis in axes],
            [_renumbered(placements[axis], group.before.index) for axis in axes],
        )
        if own is None:
            return None
        for axis, placement in zip(axes, own, strict=True):
            result[axis] = _renumbered(placement, group.after.__getitem__)
    return tuple(result)


def _reshape_group(
    before: list[int], after: list[int], num_ranks: list[int], placements: list[Placement]
) -> list[Placement] | None:
    """Return placements on ``after``, dims and placements being those of one group."""
    if before == after:
        return placements
    if len(placements) == 1:
        moved = _reshape_one(before, after, num_ranks[0], placements[0])
        return None if moved is None else [moved]
    # Several axes: all of them evenly on one dim, whose parts are then whole parts of another.
    dims = {p.dim for p in placements if type(p) is Shard}
    if len(dims) != 1 or any(type(p) is not Shard for p in placements):
        return None
    moved = _reshape_one(before, after, math.prod(num_ranks), Shard(dims.pop()))
    if type(moved) is not Shard or _uneven(before, placements[0], num_ranks):
        return None
    same: list[Placement] = [moved] * len(placements)
    return same


def _uneven(before: list[int], placement: Placement, num_ranks: list[int]) -> bool:
    assert isinstance(placement, Shard)
    return before[placement.dim] % math.prod(num_ranks) != 0


def _reshape_one(
    before: list[int], after: list[int], num_ranks: int, placement: Placement
) -> Placement | None:
    match placement:
        case RaggedShard(dims=(0,)):
            return _consecutive(before, after, num_ranks, placement)
        case InterleavedShard(dim=0, parts=int(parts)):
            return _interleaved(before, after, num_ranks, parts)
        case Shard(dim=0):
            return _consecutive(before, after, num_ranks, placement)
        case Shard(dim=dim):
            return _inner(before, after, num_ranks, dim)
        case _:
            return None


def _consecutive(
    before: list[int], after: list[int], num_ranks: int, placement: Placement
) -> Placement | None:
    """Consecutive blocks of the first dim stay consecutive blocks of the elements."""
    inner_before, inner_after = math.prod(before[1:]), math.prod(after[1:])
    units: list[int] = []
    for rank in range(num_ranks):
        rows = local_shape(before[:1], (num_ranks,), (rank,), (placement,))[0]
        count, rest = divmod(rows * inner_before, inner_after)
        if rest:
            return None
        units.append(count)
    return as_shard(0, tuple(units))


def _interleaved(
    before: list[int], after: list[int], num_ranks: int, parts: int
) -> Placement | None:
    """Equal parts that are cut each on its own, like a fused weight: (3 * h * d) -> (3, h, d)."""
    if len(before) != 1:
        return None
    leading = 1
    for dim, size in enumerate(after[:-1]):
        leading *= size
        if leading == parts:
            rest = after[dim + 1 :]
            moved = _consecutive([before[0] // parts], rest, num_ranks, Shard(0))
            return None if moved is None else on_dim(moved, dim + 1)
    return None


def _inner(before: list[int], after: list[int], num_ranks: int, dim: int) -> Placement | None:
    """A cut of a dim that is not the first: the parts repeat for every index before it."""
    leading = math.prod(before[:dim])
    outer = 1
    for position, size in enumerate(after):
        if outer == leading:
            moved = _consecutive(before[dim:], after[position:], num_ranks, Shard(0))
            return None if moved is None else on_dim(moved, position)
        outer *= size
    # Flattened into the first dim: the parts of every leading index, one after the other.
    per_index = math.prod(before[dim:])
    inner_after = math.prod(after[1:])
    if before[dim] % num_ranks or after[0] % leading or per_index % (num_ranks * inner_after):
        return None
    return InterleavedShard(0, leading)


def as_shard(dim: int, units: tuple[int, ...]) -> Placement:
    """Return the placement of consecutive parts of ``units`` indices: even if they are."""
    total = sum(units)
    chunk = -(-total // len(units))
    even = tuple(max(0, min(chunk, total - chunk * rank)) for rank in range(len(units)))
    return Shard(dim) if units == even else RaggedShard((dim,), 1, units)


def _group_of(known: Sequence[Group], placement: Placement) -> Group | None:
    dims = placement.dims if isinstance(placement, RaggedShard) else (_dim(placement),)
    return next((group for group in known if set(dims) <= set(group.before)), None)


def _dim(placement: Placement) -> int:
    return placement.dim if isinstance(placement, Shard | InterleavedShard) else -1


def _renumbered(placement: Placement, number: Callable[[int], int]) -> Placement:
    """Return ``placement`` with other numbers for its dims: within a group, or of all dims."""
    if isinstance(placement, RaggedShard):
        dims = tuple(map(number, placement.dims))
        return RaggedShard(dims, placement.granularity, placement.local_units)
    return on_dim(placement, number(_dim(placement)))
