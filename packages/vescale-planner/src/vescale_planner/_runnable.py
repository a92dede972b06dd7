"""Which of the candidates would the runtime refuse? Its own checks are asked, stages tried."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from vescale_parallel import (
    ObservationError,
    ParallelPlan,
    check_micro_batches,
    check_pipeline,
    check_supported,
    planned_context,
    planned_experts,
)

from ._explanations.reasons import runners_up
from ._search.ranking import ScoredCandidate, SearchResult, distinct, ranked
from ._search.search import Search
from ._space.candidates import Candidate
from ._space.layouts import is_pipeline_asked_for
from ._workload import few_tokens

# Stages, whether micro-batches are run one after the other, whether the batch is cut at all,
# whether there are several ranks, how many share a sequence, and whether experts are shared, by
# numbers that divide them: what the runtime's checks depend on.
_Kind = tuple[int, bool, bool, bool, int, bool]
# Pipelines refused for one reason, after which no other is tried.
_ENOUGH = 3


def runnable(
    result: SearchResult,
    search: Search,
    fill_in: Callable[[ScoredCandidate], ParallelPlan],
    *,
    num_returned: int = 0,
) -> SearchResult:
    """Return what was found, without candidates that would not run among those to be returned.

    Of those that are only named the fastest pipeline is tried, and no sharding plan is proven.
    Pipelines that nobody asked for are left out as well if it cannot be said whether they run;
    all of them once several were refused for one reason.

    Args:
        result: Candidates, best first.
        search: What they were found by.
        fill_in: Returns the plan that a candidate stands for.
        num_returned: How many are going to be returned beside the first.
    """
    tried: dict[_Kind, str] = {}
    while result.fits:
        result, returned = _proven(result, search, num_returned)
        if not returned:
            break  # no size of tensor parallelism was proven that others were priced by
        for each in returned:
            kind = _kind(each.candidate)
            if kind not in tried:
                plan = fill_in(each)
                tried[kind] = _refusal(plan, search, kind) or _refusal_in_parts(plan, search)
        for each in runners_up(result):
            kind = _kind(each.candidate)
            if each.candidate.layout.pp > 1:
                if kind not in tried and (why := _refusal_of_named(fill_in(each), search, kind)):
                    tried[kind] = why
                break
        none = _refuses_all(tried) and not is_pipeline_asked_for(search.constraints)
        kept = [
            each
            for each in result.fits
            if not tried.get(_kind(each.candidate)) and not (none and each.candidate.stages > 1)
        ]
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


def _refuses_all(tried: Mapping[_Kind, str]) -> bool:
    """Whether so many pipelines were refused for one reason that others would be, too."""
    said = Counter(re.sub(r"\d+", "#", why) for kind, why in tried.items() if why and kind[0] > 1)
    return max(said.values(), default=0) >= _ENOUGH


def _proven(
    result: SearchResult, search: Search, num_returned: int
) -> tuple[SearchResult, list[ScoredCandidate]]:
    """Return a result and who is returned of it, all of whose sharding plans are proven."""
    while result.fits:
        returned = [result.fits[0], *runners_up(result, num_returned)]
        before = result
        for each in returned:
            result = search.proven(result, each.candidate.layout.tp)
        if result is before:
            return result, returned
    return result, []


def _kind(candidate: Candidate) -> _Kind:
    layout = candidate.layout
    is_cut = layout.dp * candidate.parts > 1
    many = layout.dp * layout.cp * layout.tp * layout.pp > 1
    shares = layout.cp, layout.ep > 1
    return candidate.stages, candidate.accumulation > 1, is_cut, many, *shares


def _refusal(plan: ParallelPlan, search: Search, kind: _Kind) -> str:
    """Return why the runtime would refuse a plan of a kind, or why that is not known.

    Of rows that run in parts see :func:`_refusal_in_parts`.
    """
    try:
        check_supported(plan, search.model)
        planned_experts(plan, search.model)
        if search.workload.observed:
            planned_context(plan, search.model, search.example_batch)
    except ValueError as error:
        return str(error)
    if plan.pipeline_parallel.size > 1:
        if kind not in search.pipelines:
            search.pipelines[kind] = _refusal_of_pipeline(plan, search)
        if search.pipelines[kind]:
            return search.pipelines[kind]
    return ""


def _refusal_of_named(plan: ParallelPlan, search: Search, kind: _Kind) -> str:
    """Return why the runtime would refuse a pipeline that is not returned, only named.

    To see whether rows depend on each other the model is run on several batches, forward and
    backward, which takes as long as to prove a sharding plan. Ranks that accumulate were asked
    that of every number that a model makes; a pipeline is asked of those with gradients, so that
    little is left that it alone would be refused for.
    """
    refused = _refusal(plan, search, kind)
    are_apart = search.in_parts.get(False) == ""
    return refused if refused or are_apart else _refusal_in_parts(plan, search)


def _refusal_in_parts(plan: ParallelPlan, search: Search) -> str:
    """Return why rows cannot be run in the parts of a plan; asked once of each who runs them."""
    pipelined = plan.pipeline_parallel.size > 1
    num_parts = plan.data_parallel.size * plan.num_microbatches
    is_in_parts = plan.batch.gradient_accumulation > 1 or (pipelined and num_parts > 1)
    if not is_in_parts or not search.workload.observed:
        return ""
    if pipelined not in search.in_parts:
        batch = few_tokens(search.example_batch, search.workload)
        try:
            check_micro_batches(plan, search.model, batch)
            search.in_parts[pipelined] = ""
        except ValueError as error:
            search.in_parts[pipelined] = str(error)
    return search.in_parts[pipelined]


def _refusal_of_pipeline(plan: ParallelPlan, search: Search) -> str:
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
