"""Which of the candidates would the runtime refuse? Its own checks are asked, stages tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vescale_parallel import ObservationError, ParallelPlan, check_pipeline, check_supported

from ._candidates import Candidate, is_pipeline_asked_for
from ._explain import NUM_RUNNERS_UP, runners_up
from ._search import ScoredCandidate, Search, SearchResult, distinct, ranked
from ._workload import few_tokens

# Stages, whether micro-batches are run one after the other, whether the batch is cut at all, and
# whether there are several ranks: what the runtime's checks depend on.
_Kind = tuple[int, bool, bool, bool]


def runnable(
    result: SearchResult,
    search: Search,
    fill_in: Callable[[ScoredCandidate], ParallelPlan],
    *,
    num_named: int = NUM_RUNNERS_UP,
) -> SearchResult:
    """Return what was found, without candidates to be named that would not run.

    Pipelines that nobody asked for are left out as well if it cannot be said whether they run.

    Args:
        result: Candidates, best first.
        search: What they were found by.
        fill_in: Returns the plan that a candidate stands for.
        num_named: How many are going to be named beside the first.
    """
    tried: dict[_Kind, str] = {}
    while result.fits:
        result, named = _proven(result, search, num_named)
        for each in named:
            kind = _kind(each.candidate)
            if kind not in tried:
                tried[kind] = _refusal(fill_in(each), search)
        kept = [each for each in result.fits if not tried.get(_kind(each.candidate))]
        if len(kept) == len(result.fits):
            break
        result = replace(result, fits=tuple(ranked(kept)))
    while not result.fits and result.too_large:
        smallest = result.too_large[0]
        result = search.proven(result, smallest.candidate.layout.tp)
        if result.fits or smallest in result.too_large[:1]:
            break
    reasons = [
        f"{kind[0]} pipeline stages: {why}" if kind[0] > 1 else why
        for kind, why in sorted(tried.items())
        if why
    ]
    return replace(result, rejected=tuple(distinct((*reasons, *result.rejected))))


def _proven(
    result: SearchResult, search: Search, num_named: int
) -> tuple[SearchResult, list[ScoredCandidate]]:
    """Return a result and who is named of it, all of whose sharding plans are proven."""
    while result.fits:
        named = [result.fits[0], *runners_up(result, num_named)]
        before = result
        for each in named:
            result = search.proven(result, each.candidate.layout.tp)
        if result is before:
            return result, named
    return result, []


def _kind(candidate: Candidate) -> _Kind:
    layout = candidate.layout
    is_cut = layout.dp * candidate.parts > 1
    many = layout.dp * layout.tp * layout.pp > 1
    return candidate.stages, candidate.accumulation > 1, is_cut, many


def _refusal(plan: ParallelPlan, search: Search) -> str:
    """Return why the runtime would refuse a plan, or why that is not known."""
    try:
        check_supported(plan, search.model)
    except ValueError as error:
        return str(error)
    if plan.pipeline_parallel.size == 1:
        return ""
    is_asked_for = is_pipeline_asked_for(search.constraints)
    if not search.workload.observed:
        why = "needs an example_batch that can be observed, to see whether the blocks make one"
        return "" if is_asked_for else why
    try:
        batch = few_tokens(search.example_batch, search.workload)
        check_pipeline(plan, search.model, batch)
    except ObservationError as error:
        return "" if is_asked_for else str(error)
    except ValueError as error:
        return str(error)
    return ""
