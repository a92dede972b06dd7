"""The steps from one layout to another with the fewest bytes. Integers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from torch.distributed.tensor import Partial, Placement, Shard

from vescale_dtensor._layout.boxes import Chunks, DimCut, cuts_of, dims_of, local_shape
from vescale_dtensor._layout.placements import InterleavedShard, RaggedShard, ReduceOp
from vescale_dtensor._torch_private import StridedShard

from .element_counts import Coordinate, DimCuts, ElementCounts, axes_of, difference
from .partial_reductions import masks, pending, reductions
from .steps import Step, Transfer, TransferKind

_OPS = ("sum", "avg", "max", "min", "product")
# What a collective costs besides its bytes, as the elements one could move meanwhile.
_LATENCY_NUMEL = 1024


@dataclass(frozen=True)
class _Plan:
    """The steps, and how many elements the busiest rank receives in all of them."""

    steps: tuple[Step, ...]
    numel: int


def plan_redistribution(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> tuple[Step, ...]:
    """Return the steps that take a tensor from one layout to another.

    Without pending reductions that is one uneven all-to-all, or all-gather, or nothing but a
    local copy. Pending values are reduced first, each element on one rank of the group, in
    rank order, unless that is so small that every rank may as well reduce all of it. See
    [Note: pending reductions].

    Returns:
        No step at all if every rank holds already what it should.

    Raises:
        ValueError: If placements do not fit the shape or the mesh, or a pending reduction is
            none of sum, avg, max, min and product.
        TypeError: If a placement is of an unknown class.

    Example:
        >>> from torch.distributed.tensor import Partial, Shard
        >>> (step,) = plan_redistribution((8, 8), (4,), (Partial(),), (Shard(0),))
        >>> step.describe(["tp"])
        'reduce-scatter (sum) over tp, 48 elements'
    """
    return _plan(shape, mesh_shape, source, target, _LATENCY_NUMEL).steps


def redistribution_numel(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> int:
    """Return how many elements the busiest rank receives; from a sample beyond 256 ranks.

    The arguments are those of :func:`plan_redistribution`.
    """
    return _plan(shape, mesh_shape, source, target, _LATENCY_NUMEL).numel


@lru_cache(maxsize=65536)
def _plan(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    latency_numel: int,
) -> _Plan:
    if source == target:
        return _Plan((), 0)
    layout, goal = (
        _checked_cuts(shape, mesh_shape, placements) for placements in (source, target)
    )
    planner = _Planner(shape or (1,), mesh_shape, latency_numel)
    segments, fresh = reductions(mesh_shape, source, target)
    sums = tuple(axis for axis, op in fresh if op == "sum")
    held = frozenset(pending(source))
    steps: list[Step] = []
    for position, (op, axes) in enumerate(segments):
        if position < len(segments) - 1:
            middles = [planner.scatter_between(layout, goal, axes)]
        else:
            middles = planner.scatters(layout, goal, axes, held)
        paths = (planner.path(layout, middle, goal, axes, op, sums) for middle in middles)
        reduction = min(paths, key=planner.cost)[0]
        steps.append(reduction)
        layout = reduction.target
    steps += planner.rearrange(layout, goal, sums)
    numel = planner.numel_received(cast("Sequence[Transfer]", steps))
    steps += masks(layout, target, fresh)
    return _Plan(tuple(steps), numel)


def _checked_cuts(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> DimCuts:
    corner = (0,) * len(mesh_shape)
    cuts = cuts_of(mesh_shape, corner, placements)
    local_shape(shape, mesh_shape, corner, placements)
    for placement in placements:
        if isinstance(placement, Partial) and (
            type(placement) is not Partial or placement.reduce_op not in _OPS
        ):
            raise ValueError(
                f"expected a Partial whose reduction is one of {_OPS}, got {placement!r}"
            )
    return cuts


class _Planner:
    """Looks for the cheapest way between layouts of one tensor, of one dim at least."""

    def __init__(
        self, shape: tuple[int, ...], mesh_shape: tuple[int, ...], latency_numel: int
    ) -> None:
        self._shape = shape
        self._mesh_shape = mesh_shape
        self._latency_numel = latency_numel
        self._counts = ElementCounts(shape, mesh_shape)

    def path(
        self,
        source: DimCuts,
        middle: DimCuts,
        target: DimCuts,
        axes: tuple[int, ...],
        op: ReduceOp,
        sums: tuple[int, ...],
    ) -> list[Transfer]:
        """Return a reduction that leaves elements where ``middle`` says, and what follows."""
        whole = not any(difference(source, middle))
        reduction = self._transfer(
            "all_gather" if whole else "all_to_all", axes, source, middle, op
        )
        return [reduction, *self.rearrange(middle, target, sums)]

    def rearrange(self, source: DimCuts, target: DimCuts, sums: tuple[int, ...]) -> list[Transfer]:
        """Return the step that gives every rank what it lacks, if there is anything to do.

        An axis along which the source is whole takes no part: the ranks along it hold the
        same. Nor does one along which a sum becomes pending. So an element has one holder in
        a group, or none.
        """
        before, after = difference(source, target)
        embeds = not axes_of(source).isdisjoint(sums)
        if not before and not after and not embeds:
            return []
        used = axes_of(before)
        axes = tuple(sorted(a for a in used if self._mesh_shape[a] > 1 and a not in sums))
        equal = not after and not embeds and self._is_even(source)
        transfer = self._transfer(
            "all_gather" if equal else "all_to_all", axes, source, target, embeds=embeds
        )
        coordinates, is_all = self._counts.coordinates(source, target)
        if is_all and not any(self._received(transfer, c) for c in coordinates):
            transfer = self._transfer("local", (), source, target, embeds=embeds)
        return [transfer]

    def _transfer(
        self,
        kind: TransferKind,
        axes: tuple[int, ...],
        source: DimCuts,
        target: DimCuts,
        op: ReduceOp | None = None,
        *,
        embeds: bool = False,
    ) -> Transfer:
        return Transfer(
            kind=kind if axes else "local",
            axes=axes,
            shape=self._shape,
            mesh_shape=self._mesh_shape,
            source=source,
            target=target,
            reduce_op=op,
            embeds=embeds,
        )

    def cost(self, steps: Sequence[Transfer]) -> tuple[int, int]:
        """Return elements received, latency among them, and the number of collectives."""
        collectives = sum(step.kind != "local" for step in steps)
        return self.numel_received(steps) + self._latency_numel * collectives, collectives

    def numel_received(self, steps: Sequence[Transfer]) -> int:
        """Return how many elements the busiest rank receives in all steps."""
        steps = [step for step in steps if step.kind != "local"]
        layouts = [cuts for step in steps for cuts in (step.source, step.target)]
        coordinates, _ = self._counts.coordinates(*layouts)
        return max(sum(self._received(step, c) for step in steps) for c in coordinates)

    def _received(self, step: Transfer, coordinate: Coordinate) -> int:
        counts, source, target = self._counts, step.source, step.target
        if step.reduce_op:
            return (step.num_ranks - 1) * counts.held(target, coordinate)
        own = counts.shared(source, target, coordinate)
        if step.embeds:
            return counts.shared(source, target, coordinate, step.axes) - own
        return counts.held(target, coordinate) - own

    def scatters(
        self, source: DimCuts, target: DimCuts, axes: tuple[int, ...], held: frozenset[int]
    ) -> list[DimCuts]:
        """Return layouts in which elements may be reduced over ``axes`` on the way to ``target``.

        They refine ``source``: where it says, as ``target`` says where that fits, and spread
        over the axes that are left. Those along which ``source`` is whole may help; ``held``
        are those with values pending.
        """
        wanted = axes_of(target)
        idle = [
            axis
            for axis, num_ranks in enumerate(self._mesh_shape)
            if num_ranks > 1 and axis not in held and axis not in axes_of(source)
        ]
        found: list[DimCuts] = []
        before, after = difference(source, target)
        if not before and wanted.issuperset((*axes, *idle)) and self._is_even(target):
            return [target]
        if not before:
            found += [target, *self._spreads(target, axes, idle)]
        for extra in (idle, []) if idle else ([],):
            own = [axis for axis in sorted((*axes, *extra)) if axis in wanted]
            aligned = (*source, *_fitting(source, target, own))
            found += self._spreads(aligned, axes, extra) or [aligned]
            found += self._spread((*source, *_fitting(source, target, extra)), axes)
        # Cut across what follows, so that every rank keeps as much of its part.
        avoided = frozenset(dim for cut in after for dim in dims_of(cut))
        found += self._spread(source, axes, avoided)
        return list(dict.fromkeys(found))

    def scatter_between(self, source: DimCuts, target: DimCuts, axes: tuple[int, ...]) -> DimCuts:
        """Return where to reduce over ``axes`` if another reduction follows."""
        aligned = (*source, *_fitting(source, target, axes))
        choices = [*(self._spreads(aligned, axes, ()) or [aligned]), *self._spread(source, axes)]
        corner = (0,) * len(self._mesh_shape)
        return min(choices, key=lambda layout: self._counts.held(layout, corner))

    def _spreads(self, cuts: DimCuts, axes: Sequence[int], extra: Sequence[int]) -> list[DimCuts]:
        """Return ``cuts`` spread over ``axes``, and over ``extra`` too, if not cut by them."""
        used = axes_of(cuts)
        few = tuple(axis for axis in axes if axis not in used)
        many = tuple(sorted({*few, *(axis for axis in extra if axis not in used)}))
        return [
            layout
            for each in dict.fromkeys((few, many))
            if each
            for layout in self._spread(cuts, each)
        ]

    def _spread(
        self, cuts: DimCuts, axes: tuple[int, ...], avoided: frozenset[int] = frozenset()
    ) -> list[DimCuts]:
        """Return ``cuts`` and one that spreads what they leave evenly over ``axes``.

        Where nothing is even, what is best for the first group may not be for the last.
        """
        first = (0,) * len(self._mesh_shape)
        last = tuple(0 if axis in axes else n - 1 for axis, n in enumerate(self._mesh_shape))
        spread = [
            (*cuts, DimCut(axes, Chunks(dims)))
            for dims in self._windows(cuts)
            if not avoided.intersection(dims)
        ]
        if not spread:
            return []

        def cost_at(coordinate: Coordinate) -> Callable[[DimCuts], tuple[int, int]]:
            def cost(layout: DimCuts) -> tuple[int, int]:
                return self._counts.held(layout, coordinate), len(dims_of(layout[-1]))

            return cost

        best = (min(spread, key=cost_at(coordinate)) for coordinate in (first, last))
        return list(dict.fromkeys(best))

    def _windows(self, cuts: DimCuts) -> Iterator[tuple[int, ...]]:
        """Yield runs of dims whose flattened parts are few boxes."""
        edge = {dim: dims_of(cut) for cut in cuts for dim in dims_of(cut) if len(dims_of(cut)) > 1}
        broken = {
            dims_of(cut)[0]
            for cut in cuts
            if len(dims_of(cut)) > 1 or isinstance(cut.rule, InterleavedShard | StridedShard)
        }
        num_dims = len(self._shape)
        for first in range(num_dims):
            for stop in range(first + 1, num_dims + 1):
                dims = range(first, stop)
                whole = all(set(edge.get(dim, ())) <= set(dims) for dim in dims)
                own = edge.get(first, (first,))
                if whole and not any(dim in broken and dim not in own for dim in dims):
                    yield tuple(dims)

    def _is_even(self, cuts: DimCuts) -> bool:
        """Whether all ranks hold equally many elements, by the look of the cuts."""
        sizes = dict(enumerate(self._shape))
        for cut in cuts:
            num_ranks = math.prod(self._mesh_shape[axis] for axis in cut.axes)
            dims = dims_of(cut)
            length = math.prod(sizes[dim] for dim in dims)
            if not _cuts_evenly(cut.rule, length, num_ranks):
                return False
            sizes |= dict.fromkeys(dims, 1) | {dims[0]: length // num_ranks}
        return True


def _fitting(source: DimCuts, target: DimCuts, axes: Sequence[int]) -> list[DimCut]:
    """Return the cuts of ``target`` over ``axes`` that can follow those of ``source``."""
    flat = {dim for cut in source if len(dims_of(cut)) > 1 for dim in dims_of(cut)}
    return [
        cut
        for axis in axes
        for cut in target
        if cut.axes == (axis,) and isinstance(cut.rule, Shard) and cut.rule.dim not in flat
    ]


def _cuts_evenly(rule: Placement | Chunks, length: int, num_ranks: int) -> bool:
    match rule:
        case RaggedShard(local_units=units, granularity=granularity):
            return len(set(units)) == 1 and granularity * sum(units) == length
        case InterleavedShard():
            return all(part % num_ranks == 0 for part in rule.lengths(length))
        case StridedShard(split_factor=split_factor):
            return length % (int(split_factor) * num_ranks) == 0
        case _:
            return length % num_ranks == 0
