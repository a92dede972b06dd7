"""What slices of sequences would take: priced beside the search, said, and chosen if need be.

Of what a model returns beside its loss each rank has a slice then, which a loop may not expect. So
slices are chosen unasked where no other plan fits, and only there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ._prices.cost import seconds
from ._search.ranking import TIE, ScoredCandidate, SearchResult, ranked
from ._search.search import Search

# Ranks that share a sequence; fewer tokens a rank than these make products of matrices slow.
_SIZES, _FEWEST_TOKENS = (2, 4, 8, 16), 1024
_KEPT = 16


@dataclass(frozen=True)
class Contexts:
    """Candidates with context parallelism.

    Attributes:
        fits: The fastest of those that fit.
        num_scored: How many were priced.
    """

    fits: tuple[ScoredCandidate, ...]
    num_scored: int

    def instead_of(self, result: SearchResult) -> SearchResult:
        """Return a result with these, where nothing else fits."""
        return result if result.fits else replace(result, fits=tuple(ranked([*self.fits])))


def priced_contexts(search: Search, world_size: int) -> Contexts:
    """Price what a search would find with every size of context parallelism that may be.

    All have the batch of the search.
    """
    fits: list[ScoredCandidate] = []
    num_scored = 0
    batch = search.rows(world_size).global_size
    for size in _sizes(search, world_size):
        given = {**search.constraints, "context_parallel.size": size, "batch.global_size": batch}
        # What ranks own is the same: it is not worked out again.
        sliced = replace(search, constraints=given)
        try:
            result = sliced.run(world_size)
        except ValueError:  # no sizes of the other axes multiply to the rest
            continue
        num_scored += len(result.fits) + len(result.too_large)
        fits += sorted(result.fits, key=_speed)[:_KEPT]
    return Contexts(tuple(sorted(fits, key=_speed)[:_KEPT]), num_scored)


def _speed(scored: ScoredCandidate) -> tuple[float, object]:
    return scored.seconds_per_row, scored.candidate


def _sizes(search: Search, world_size: int) -> Iterator[int]:
    given, workload = search.constraints, search.workload
    asked = given.get("context_parallel.size") or given.get("tensor_parallel.sequence")
    attends = any(part.attention_flops for part in workload.blocks)
    if asked or not attends:
        return
    for size in _SIZES:
        if world_size % size == 0 and workload.tokens >= size * _FEWEST_TOKENS:
            yield size


def said(contexts: Contexts, winner: ScoredCandidate) -> list[str]:
    """Return what context parallelism would win, if that is more than counts as equal."""
    if winner.candidate.layout.cp > 1 or not contexts.fits:
        return []
    best = contexts.fits[0]
    if winner.seconds_per_row <= TIE * best.seconds_per_row:
        return []
    ratio = best.seconds_per_row / winner.seconds_per_row
    size = best.candidate.layout.cp
    took = f"{ratio:.3g} x the time, {seconds(best.step_seconds)} a step"
    how = f"constrain context_parallel.size to {size} if its attention may be sliced"
    return [f"priced, not chosen: {best.candidate}: {took}; {how}"]
