"""Which global tensor do the parts that ranks hold make up?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor._comm.emulation import per_rank
from vescale_dtensor._comm.primitives import all_gather_rows
from vescale_dtensor._layout.layout import Placements
from vescale_dtensor._layout.placements import InterleavedShard, RaggedShard


def infer_layout(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], Placements]:
    """Return the global shape and the placements that local shapes imply.

    The ranks tell each other their shapes; every rank of ``mesh`` must call this. ``Shard`` of
    parts that are not those of an even cut becomes ``RaggedShard``.

    Raises:
        ValueError: If the parts cannot be put together.
    """
    told = per_rank(
        lambda _, part: torch.tensor(
            (part.ndim, *part.shape), dtype=torch.int64, device=mesh.device_type
        ),
        mesh,
        local,
    )
    axes = tuple(range(mesh.ndim))
    rows = per_rank(
        lambda _, *rows: [tuple(row.tolist()) for row in rows],
        mesh,
        *all_gather_rows(told, mesh, axes),
    )
    shapes = dict(zip(product(*map(range, mesh.shape)), (row[1:] for row in rows), strict=True))
    inferred = list(placements)
    # The innermost axis was cut last, so its parts are the ones to be put together first.
    for axis in reversed(axes):
        shapes, inferred[axis] = _join_axis(shapes, axis, mesh.size(axis), inferred[axis])
    return shapes[(0,) * mesh.ndim], tuple(inferred)


_Shapes = dict[tuple[int, ...], tuple[int, ...]]


def _join_axis(
    shapes: _Shapes, axis: int, num_ranks: int, placement: Placement
) -> tuple[_Shapes, Placement]:
    """Put the parts along one mesh axis together."""
    joined: _Shapes = {}
    found: set[Placement] = set()
    for coordinate in shapes:
        if coordinate[axis]:
            continue
        parts = [
            shapes[(*coordinate[:axis], index, *coordinate[axis + 1 :])]
            for index in range(num_ranks)
        ]
        joined[coordinate], settled = _join_parts(parts, axis, placement)
        found.add(settled)
    if len(found) > 1:
        raise ValueError(
            f"ranks hold differently uneven parts under {placement!r} of mesh axis {axis}: "
            f"{sorted(map(repr, found))}; give shape= and placements that say so"
        )
    return joined, found.pop()


def _join_parts(
    parts: list[tuple[int, ...]], axis: int, placement: Placement
) -> tuple[tuple[int, ...], Placement]:
    if isinstance(placement, Replicate | Partial):
        if len(set(parts)) > 1:
            raise ValueError(
                f"expected local tensors of one shape under {placement!r} of mesh axis {axis}, "
                f"got {parts}"
            )
        return parts[0], placement
    if not isinstance(placement, Shard | InterleavedShard):
        raise ValueError(f"expected shape= for {placement!r}: local shapes do not imply it")
    dim = placement.dim % len(parts[0])
    others = {(*part[:dim], *part[dim + 1 :]) for part in parts}
    if len(others) > 1:
        raise ValueError(
            f"expected local tensors that differ in dim {dim} only under {placement!r} of mesh "
            f"axis {axis}, got {parts}"
        )
    sizes = [part[dim] for part in parts]
    total = sum(sizes)
    shape = (*parts[0][:dim], total, *parts[0][dim + 1 :])
    chunk = -(-total // len(parts))
    even = [max(0, min(chunk, total - chunk * index)) for index in range(len(parts))]
    if sizes == even or isinstance(placement, InterleavedShard) or not total:
        return shape, placement
    return shape, RaggedShard((dim,), 1, tuple(sizes))
