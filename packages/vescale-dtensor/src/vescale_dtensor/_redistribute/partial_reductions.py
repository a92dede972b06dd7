"""Which pending reductions a redistribution carries out, in which order, and which it makes.

[Note: pending reductions] Several axes may hold pending values at once. They are reduced from
the innermost mesh axis outward: under (Partial("max"), Partial("sum")) an element is the
maximum over the first axis of sums over the second. Neighbouring axes with one operation are
reduced as one group, in row-major rank order. An axis whose reduction stays pending is left
alone, unless an axis outside of it with another operation has to be reduced first (a sum and
an average may change places). None of this depends on how the reduced tensor is to be laid
out, and so neither do its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from torch.distributed.tensor import Partial, Placement

from vescale_dtensor._layout.placements import ReduceOp

from .element_counts import DimCuts, axes_of
from .steps import Mask


def pending(placements: Sequence[Placement]) -> dict[int, ReduceOp]:
    """Return the operation on each mesh axis that has a pending one."""
    return {
        axis: cast(ReduceOp, placement.reduce_op)
        for axis, placement in enumerate(placements)
        if isinstance(placement, Partial)
    }


def reductions(
    mesh_shape: Sequence[int], source: Sequence[Placement], target: Sequence[Placement]
) -> tuple[list[tuple[ReduceOp, tuple[int, ...]]], list[tuple[int, ReduceOp]]]:
    """Return what is reduced over which axes, in order, and what becomes pending where.

    Axes of one rank need neither. See [Note: pending reductions].
    """
    chosen: dict[int, ReduceOp] = {}
    for axis, op in pending(source).items():
        if source[axis] != target[axis] or not all(_commute(op, o) for o in chosen.values()):
            chosen[axis] = op
    segments: list[tuple[ReduceOp, tuple[int, ...]]] = []
    for axis, op in reversed(chosen.items()):
        if mesh_shape[axis] == 1:
            continue
        if segments and segments[-1][0] == op:
            segments[-1] = (op, (axis, *segments[-1][1]))
        else:
            segments.append((op, (axis,)))
    fresh: list[tuple[int, ReduceOp]] = [
        (axis, op)
        for axis, op in pending(target).items()
        if mesh_shape[axis] > 1 and (axis in chosen or not isinstance(source[axis], Partial))
    ]
    return segments, fresh


def _commute(left: ReduceOp, right: ReduceOp) -> bool:
    return left == right or {left, right} == {"sum", "avg"}


def masks(
    layout: DimCuts, target: Sequence[Placement], fresh: Sequence[tuple[int, ReduceOp]]
) -> list[Mask]:
    """Return the step that makes a value pending along axes that it was not cut along."""
    embedded = axes_of(layout)
    fills: list[tuple[int, Literal["sum", "product"]]] = []
    for axis, op in fresh:
        if op == "product" or (op == "sum" and axis not in embedded):
            fills.append((axis, op))
    sums = tuple(axis for axis, op in pending(target).items() if op == "sum")
    return [Mask(fills=tuple(fills), sums=sums)] if fills else []
