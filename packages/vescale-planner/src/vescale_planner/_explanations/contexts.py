"""What slices of sequences would take: priced beside the search, and said, not chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vescale_planner._prices.cost import seconds
from vescale_planner._ranking import TIE, ScoredCandidate
from vescale_planner._search import Search

# Ranks that share a sequence; fewer tokens a rank than these make products of matrices slow.
_SIZES, _FEWEST_TOKENS = (2, 4, 8, 16), 1024


@dataclass(frozen=True)
class Contexts:
    """Candidates with context parallelism.

    Attributes:
        best: The fastest that fits; None if none does.
        num_scored: How many were priced.
    """

    best: ScoredCandidate | None
    num_scored: int


def priced_contexts(search: Search, world_size: int) -> Contexts:
    """Price what a search would find with every size of context parallelism that may be.

    All have the batch of the search. They are not returned as plans: whether attention is of a
    kind that slices can be sent for is only known to the runtime, which asks when it starts.
    """
    best: ScoredCandidate | None = None
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
        fastest = min(result.fits, key=lambda s: (s.seconds_per_row, s.candidate), default=None)
        if fastest and (best is None or fastest.seconds_per_row < best.seconds_per_row):
            best = fastest
    return Contexts(best, num_scored)


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
    best = contexts.best
    if best is None or winner.seconds_per_row <= TIE * best.seconds_per_row:
        return []
    ratio = best.seconds_per_row / winner.seconds_per_row
    size = best.candidate.layout.cp
    took = f"{ratio:.3g} x the time, {seconds(best.step_seconds)} a step"
    how = f"write it, ContextParallel(size={size}), if its attention may be sliced"
    return [f"priced, not chosen: {best.candidate}: {took}; {how}"]
