"""How many elements do two layouts give to one rank? Integers only.

The count is a product over groups of tensor dims that are cut independently, and each factor
depends on a few mesh axes. So the factors are kept, and a mesh of many ranks costs little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from vescale_dtensor._layout.boxes import Box, DimCut, dims_of, local_shard
from vescale_dtensor._layout.placements import RaggedShard

DimCuts = tuple[DimCut, ...]
Coordinate = tuple[int, ...]

# Beyond this many ranks a sample of coordinates stands for all.
_MAX_COORDINATES = 256


class ElementCounts:
    """Counts of elements for one tensor on one mesh.

    Args:
        shape: Global shape, of one dim at least.
        mesh_shape: Ranks along each mesh axis.

    Attributes:
        boxes: What was worked out so far: the boxes of a part of the shape, some cuts and a
            coordinate.
    """

    def __init__(self, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.mesh_shape = mesh_shape
        self.boxes: dict[tuple[tuple[int, ...], DimCuts, Coordinate], list[Box]] = {}
        self._products: dict[tuple[DimCuts, DimCuts], tuple[int, list[_Factor]]] = {}

    def held(self, cuts: DimCuts, coordinate: Coordinate) -> int:
        """Return how many elements a rank has."""
        return self.shared(cuts, cuts, coordinate)

    def shared(
        self, source: DimCuts, target: DimCuts, coordinate: Coordinate, axes: tuple[int, ...] = ()
    ) -> int:
        """Return how many elements of a rank's target it, or a peer along ``axes``, has.

        Every axis cuts one tensor dim of the source at most, so a sum over peers is a product
        of sums.
        """
        total, factors = self._factors(source, target)
        for factor in factors:
            total *= factor.at(coordinate, axes)
        return total

    def coordinates(self, *layouts: DimCuts) -> tuple[list[Coordinate], bool]:
        """Return coordinates at which ``layouts`` differ, and whether these are all."""
        used = {axis for cuts in layouts for cut in cuts for axis in cut.axes}
        places = [list(range(n if a in used else 1)) for a, n in enumerate(self.mesh_shape)]
        limit = max(self.mesh_shape)
        is_all = True
        while limit > 2 and math.prod(map(len, places)) > _MAX_COORDINATES:
            limit, is_all = limit * 3 // 4, False
            places = [_sample(each, limit) for each in places]
        if not is_all:
            for cut in (cut for cuts in layouts for cut in cuts):
                if isinstance(cut.rule, RaggedShard):
                    units = cut.rule.local_units
                    axis = cut.axes[0]
                    places[axis] = sorted({*places[axis], units.index(max(units))})
        return list(product(*places)), is_all

    def _factors(self, source: DimCuts, target: DimCuts) -> tuple[int, list[_Factor]]:
        found = self._products.get((source, target))
        if found is None:
            components = components_of(source, target)
            free = math.prod(
                size
                for dim, size in enumerate(self.shape)
                if not any(dim in dims for dims, _, _ in components)
            )
            factors = [_Factor(self, *component) for component in components]
            found = self._products[source, target] = (free, factors)
        return found


class _Factor:
    """What two layouts share of a few tensor dims, by the coordinate on a few mesh axes."""

    def __init__(
        self, counts: ElementCounts, dims: Sequence[int], source: DimCuts, target: DimCuts
    ) -> None:
        self._shape = tuple(n if dim in dims else 1 for dim, n in enumerate(counts.shape))
        self._mesh_shape = counts.mesh_shape
        self._source = source
        self._target = target
        self._source_axes = axes_of(source)
        self._target_axes = axes_of(target)
        self._held = counts.boxes
        # By the axes of the peers: the axes that matter besides, and counts by coordinate.
        self._tables: dict[tuple[int, ...], tuple[list[int], dict[Coordinate, int]]] = {}

    def at(self, coordinate: Coordinate, axes: tuple[int, ...] = ()) -> int:
        """Return what a rank's target shares with the source of its peers along ``axes``."""
        table = self._tables.get(axes)
        if table is None:
            fixed = sorted(self._target_axes | self._source_axes.difference(axes))
            table = self._tables[axes] = (fixed, {})
        place = tuple([coordinate[axis] for axis in table[0]])
        count = table[1].get(place)
        if count is None:
            count = table[1][place] = self._count(coordinate, axes)
        return count

    def _count(self, coordinate: Coordinate, axes: tuple[int, ...]) -> int:
        inside = [axis for axis in axes if axis in self._source_axes]
        peers = peers_of_coordinate(self._mesh_shape, coordinate, inside)
        target = self._boxes(self._target, self._target_axes, coordinate)
        total = 0
        for peer in peers:
            for held in self._boxes(self._source, self._source_axes, peer):
                for wanted in target:
                    box = wanted.intersect(held)
                    total += box.numel if box else 0
        return total

    def _boxes(self, cuts: DimCuts, axes: set[int], coordinate: Coordinate) -> list[Box]:
        """Return what a rank holds; its place along other axes makes no difference."""
        place = tuple([index if axis in axes else 0 for axis, index in enumerate(coordinate)])
        key = self._shape, cuts, place
        found = self._held.get(key)
        if found is None:
            held = local_shard(self._shape, self._mesh_shape, place, cuts)
            found = self._held[key] = [each.box for each in held.boxes]
        return found


def axes_of(cuts: DimCuts) -> set[int]:
    """Return the mesh axes that cut something."""
    return {axis for cut in cuts for axis in cut.axes}


def components_of(
    source: DimCuts, target: DimCuts
) -> list[tuple[tuple[int, ...], DimCuts, DimCuts]]:
    """Return the sets of tensor dims that are cut independently, and the cuts of each."""
    groups: list[set[int]] = []
    for cut in (*source, *target):
        dims = set(dims_of(cut))
        for group in [group for group in groups if group & dims]:
            groups.remove(group)
            dims |= group
        groups.append(dims)
    return [
        (
            tuple(sorted(dims)),
            tuple(cut for cut in source if dims_of(cut)[0] in dims),
            tuple(cut for cut in target if dims_of(cut)[0] in dims),
        )
        for dims in groups
    ]


def difference(source: DimCuts, target: DimCuts) -> tuple[DimCuts, DimCuts]:
    """Return the cuts in which two layouts differ: those of each dim after a common start."""
    left, right = list[DimCut](), list[DimCut]()
    for _, before, after in components_of(source, target):
        common = 0
        while before[common : common + 1] == after[common : common + 1] != ():
            common += 1
        left += before[common:]
        right += after[common:]
    return tuple(left), tuple(right)


def peers_of_coordinate(
    mesh_shape: Sequence[int], coordinate: Coordinate, axes: Sequence[int]
) -> list[Coordinate]:
    """Return the coordinates that differ from one along ``axes`` only, row-major."""
    places = (
        range(size) if axis in axes else (coordinate[axis],)
        for axis, size in enumerate(mesh_shape)
    )
    return list(product(*places))


def _sample(places: list[int], limit: int) -> list[int]:
    """Return at most ``limit`` of some places, the first and the last among them."""
    if len(places) <= limit:
        return places
    return [places[i * (len(places) - 1) // (limit - 1)] for i in range(limit)]
