"""Parts of sequences on ranks: between layers of tensor-parallel ones, or in whole blocks.

Between layers (Korthikanti et al. 2022) tensor-parallel ranks have a part of what each would have
whole otherwise: less memory for the same bytes sent, chosen where that is faster. In whole blocks
ranks besides have slices (context parallelism). Of what a model returns beside its loss each has a
slice then, too, which a loop may not expect: chosen where no other plan fits, else only said.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ._prices.cost import seconds
from ._search.ranking import TIE, ScoredCandidate, SearchResult, ranked
from ._search.search import Search
from ._space.candidates import Candidate

# Ranks that share a sequence; fewer tokens a rank than these make products of matrices slow.
_SIZES, _FEWEST_TOKENS = (2, 4, 8, 16), 1024
_KEPT = 16
# The fastest candidates are priced again with a sharded sequence, which changes their order by
# little, and needs less memory, but not less than this part; of these the fastest once more, with
# the sharding plan that was proven.
_PRICED_AGAIN, _LEAST_PART, _PROVEN = 8192, 0.25, 1024
# What decides about the sequence, or how layers are cut, if it is constrained.
_DECIDED = (
    "numerics", "tensor_parallel.sequence", "tensor_parallel.sharding_plan",
    "tensor_parallel.sharding_policy",
)  # fmt: skip


def with_sequence(search: Search, result: SearchResult) -> tuple[Search, SearchResult] | None:
    """Return a search with a sequence sharded between layers, where that is predicted faster.

    What it found is of its own sharding plan, which is proven for the fastest: without an example
    none can be. None if it is no faster by more than what counts as equal, or not possible.
    """
    given = search.constraints
    if not search.workload.observed or any(given.get(key) is not None for key in _DECIDED):
        return None
    most = search.cluster.memory_bytes / _LEAST_PART
    every = [
        each
        for each in (*result.fits, *result.too_large)
        if each.candidate.layout.tp > 1 and each.needed_bytes <= most
    ]
    candidates = [each.candidate for each in sorted(every, key=_speed)[:_PRICED_AGAIN]]
    priced = search.with_sequence()
    likely = search.divided(priced.scored(candidates), ())
    if not is_faster(likely, result):
        return None
    found = search.under({**given, "tensor_parallel.sequence": True}, keeps_sharding=False)
    if isinstance(found.sharding(likely.fits[0].candidate.layout.tp), str):
        return None
    fastest = _priced_again(likely.fits[:_PROVEN], priced, found)
    own = found.divided([*fastest, *likely.too_large], result.rejected)
    return (found, own) if is_faster(own, result) else None


def _priced_again(
    scored: Sequence[ScoredCandidate], before: Search, search: Search
) -> list[ScoredCandidate]:
    """Predict candidates by the sharding plan of another search, if that cuts anything else.

    With a sequence plans say more than without, but mostly cut the same: then prices are equal.
    """

    @functools.cache
    def is_cut_alike(tp: int, ep: int) -> bool:
        return before.parts_of(tp, ep) == search.parts_of(tp, ep)

    alike, others = list[ScoredCandidate](), list[Candidate]()
    for each in scored:
        if is_cut_alike(each.candidate.layout.tp, each.candidate.layout.ep):
            alike.append(replace(each, search=search))
        else:
            others.append(each.candidate)
    return alike + search.scored(others)


def is_faster(one: SearchResult, other: SearchResult) -> bool:
    """Return whether the best of one result is faster by more than what counts as equal."""
    if not one.fits or not other.fits:
        return bool(one.fits)
    return one.fits[0].seconds_per_row * TIE < other.fits[0].seconds_per_row


def said_of_sequence(winner: ScoredCandidate, without: SearchResult) -> str:
    """Return what a sharded sequence wins over the best plan without."""
    what = "tensor_parallel.sequence True: ranks have a part of what is between layers"
    if not without.fits:
        return f"{what}; no plan fits without"
    best = without.fits[0]
    ratio = winner.seconds_per_row / best.seconds_per_row
    return f"{what}: {ratio:.3g} x the time of the best plan without, {best.candidate}"


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
    attends = any(part.attention_flops for part in workload.blocks)
    if given.get("context_parallel.size") or not attends:
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
