"""Which of the candidates would the runtime refuse? A pipeline has to be tried to know that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vescale_parallel import ObservationError, ParallelPlan, check_pipeline

from ._candidates import is_pipeline_asked_for
from ._explain import NUM_RUNNERS_UP, runners_up
from ._search import ScoredCandidate, Search, SearchResult, distinct, ranked


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
    tried: dict[int, str] = {}
    while result.fits:
        for each in (result.fits[0], *runners_up(result, num_named)):
            cut = each.candidate.stages
            if each.candidate.layout.pp > 1 and cut not in tried:
                tried[cut] = _refusal(fill_in(each), search)
        refused = {cut for cut, why in tried.items() if why}
        kept = [each for each in result.fits if each.candidate.stages not in refused]
        if len(kept) == len(result.fits):
            break
        result = replace(result, fits=tuple(ranked(kept)))
    reasons = [f"{cut} pipeline stages: {why}" for cut, why in tried.items() if why]
    return replace(result, rejected=tuple(distinct((*reasons, *result.rejected))))


def _refusal(plan: ParallelPlan, search: Search) -> str:
    """Return why a pipeline would not run, or why that is not known."""
    is_asked_for = is_pipeline_asked_for(search.constraints)
    if not search.workload.observed:
        why = "needs an example_batch that can be observed, to see whether the blocks make one"
        return "" if is_asked_for else why
    try:
        check_pipeline(plan, search.model, search.example_batch)
    except ObservationError as error:
        return "" if is_asked_for else str(error)
    except ValueError as error:
        return str(error)
    return ""
