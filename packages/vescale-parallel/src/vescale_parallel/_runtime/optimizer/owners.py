"""Which rank updates a parameter as a whole, and which pieces of it all ranks have.

Arithmetic only: the same on every rank, from shapes and placements alone.

[Note: owners of whole parameters] The ranks of a pipeline stage share its parameters: each is
owned by one of them, balanced by number of elements. The owner gets the parts of parameter and
gradient that it lacks, runs the optimizer's own step, and sends every rank its part. Of copies
only the ones with the owner's coordinates along the copying axes are sent. The optimizer's state
of the parameter is on its owner alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from torch.distributed.tensor import Placement

from vescale_dtensor import LocalBox, RaggedShard, is_sharded, local_boxes, local_shape


@dataclass(frozen=True, kw_only=True)
class StageRanks:
    """The ranks that share the parameters of this rank's pipeline stage.

    Attributes:
        mesh_shape: Of the plan's mesh.
        pp_axis: Index of the mesh axis of pipeline stages, None without.
        stage: This rank's coordinate along it.
    """

    mesh_shape: tuple[int, ...]
    pp_axis: int | None
    stage: int

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes along which these ranks differ."""
        return tuple(axis for axis in range(len(self.mesh_shape)) if axis != self.pp_axis)

    @property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Where each of them is on the mesh, in row-major order."""
        return self.coordinates_of(self.stage)

    def coordinates_of(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return where the ranks of a stage are on the mesh, in row-major order."""
        ranges = [range(size) for size in self.mesh_shape]
        if self.pp_axis is not None:
            ranges[self.pp_axis] = range(stage, stage + 1)
        return tuple(product(*ranges))

    def stage_of(self, placements: Sequence[Placement]) -> int:
        """Return the stage that has a parameter."""
        if self.pp_axis is None:
            return self.stage
        held = placements[self.pp_axis]
        if not isinstance(held, RaggedShard):
            return 0
        return next(stage for stage, units in enumerate(held.local_units) if units)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What each rank of a stage has of one parameter.

    Attributes:
        shapes: Of the local tensors, by rank of the stage.
        boxes: What is where in them, by rank.
        copies: Ranks with the same number are along copying axes where the other is.
    """

    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[LocalBox, ...], ...]
    copies: tuple[int, ...]

    def has_all(self, rank: int) -> bool:
        """Whether a rank needs nothing from others to have the parameter whole."""
        return sum(other == self.copies[rank] for other in self.copies) == 1

    def sends(self, rank: int, owner: int) -> bool:
        """Whether a rank sends its part to the owner."""
        return rank != owner and self.copies[rank] == self.copies[owner]

    def numel(self, rank: int) -> int:
        """Return the number of elements that a rank has."""
        return math.prod(self.shapes[rank])


@lru_cache(maxsize=4096)
def pieces_of(
    shape: tuple[int, ...], placements: tuple[Placement, ...], ranks: StageRanks
) -> Pieces:
    """Return what each rank of a stage has of a parameter."""
    coordinates, mesh_shape = ranks.coordinates, ranks.mesh_shape
    copying = [axis for axis in ranks.axes if not is_sharded(placements[axis])]
    along = [tuple(coordinate[axis] for axis in copying) for coordinate in coordinates]
    numbers = {each: number for number, each in enumerate(dict.fromkeys(along))}
    return Pieces(
        shapes=tuple(tuple(local_shape(shape, mesh_shape, c, placements)) for c in coordinates),
        boxes=tuple(local_boxes(shape, mesh_shape, c, placements) for c in coordinates),
        copies=tuple(numbers[each] for each in along),
    )


def assign_owners(numels: Sequence[int], loads: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the owner of each parameter, and how many elements each rank then owns.

    The largest first, each to the rank that owns the fewest elements so far; of several such
    ranks the first.

    Args:
        numels: Of the parameters.
        loads: What each rank owns already.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        load, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (load + numels[index], rank))
    return owners, [load for load, _ in sorted(heap, key=lambda each: each[1])]


def owned_by(
    shape: Sequence[int], coordinate: Sequence[int], mesh_shape: Sequence[int]
) -> tuple[Placement, ...]:
    """Return the placements of a tensor with a dim of which one coordinate has everything."""
    return tuple(
        RaggedShard((0,), max(shape[0], 1), tuple(int(rank == at) for rank in range(size)))
        for at, size in zip(coordinate, mesh_shape, strict=True)
    )
