"""The planner's entry points: the best plan, and the best of several layouts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vescale_dtensor import package_logger
from vescale_parallel import Estimate, ParallelPlan, SplitMethod, model_signature, with_constraints

from ._constraints import check, check_split_points, in_order
from ._explanations.conflicts import conflict_of, said
from ._explanations.explanation import Explanation, explanation
from ._explanations.reasons import left_whole, nothing_fits, reasons, runners_up
from ._prices.memory import Memory, optimizer_states
from ._returned_loss import said_of_returned_loss
from ._runnable import runnable
from ._search.ranking import ScoredCandidate, SearchResult
from ._search.search import Search
from ._sequences import (
    is_faster,
    priced_contexts,
    said as said_of_contexts,
    said_of_sequence,
    with_sequence,
)
from ._space.candidates import RESHARD, SHARE_STATE
from ._space.layouts import ACCUMULATION
from ._space.recomputation import recompute_of
from ._workload import computed_in, itemsize_of, workload_of
from .cluster import Cluster, as_cluster

_log = package_logger("vescale.planner")
# Candidates whose prices are logged: there may be a hundred thousand.
_LOGGED = 100


def generate_plan(
    model: nn.Module,
    constraints: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
    cluster: Cluster | str | None = None,
    example_batch: Any = None,
    optimizer: str | type = "adamw",
) -> ParallelPlan:
    """Choose how to run a model on many ranks. Communicates nothing and allocates nothing.

    Every combination of tensor, pipeline and data-parallel sizes, ZeRO stage, schedule and
    micro-batches that the constraints and the model allow is scored by a memory and a cost
    model. The plan is a function of the arguments, so every rank makes the same one.

    Args:
        model: Real, on the meta device, or deferred.
        constraints: Dotted key to value, see ``vescale_parallel.constraint_keys()``. Each is
            obeyed exactly. The two may be given in either order.
        world_size: Ranks; by default ``WORLD_SIZE``, else the number of GPUs, else 1.
        cluster: The machines, or their name, one of ``Cluster.names()``; by default what this
            one has.
        example_batch: What one data-parallel rank gives the model in a step. Flops and
            activations are then observed, otherwise estimated from the parameters.
        optimizer: The optimizer's name or class, for its memory.

    Raises:
        ValueError: If a constraint is unknown or cannot be obeyed, no sizes multiply to the
            world size, or nothing fits in memory.
        TypeError: If ``model`` is no module, or ``constraints`` no mapping.

    Example:
        >>> plan = generate_plan(nn.Linear(8, 8), world_size=2, cluster="h200")
        >>> plan.data_parallel.size
        2
    """
    plans = generate_plans(
        model,
        constraints,
        top=1,
        world_size=world_size,
        cluster=cluster,
        example_batch=example_batch,
        optimizer=optimizer,
    )
    return plans[0]


def generate_plans(
    model: nn.Module,
    constraints: Mapping[str, Any] | None = None,
    *,
    top: int = 3,
    world_size: int | None = None,
    cluster: Cluster | str | None = None,
    example_batch: Any = None,
    optimizer: str | type = "adamw",
) -> tuple[ParallelPlan, ...]:
    """Choose like :func:`generate_plan`, and return the best plan of other layouts as well.

    Args:
        model: As for :func:`generate_plan`, as all others.
        constraints: Likewise.
        top: Plans to return at most, best first; no two have the same sizes of all axes. Only the
            first says in its reasons why it was chosen.
        world_size: Likewise.
        cluster: Likewise.
        example_batch: Likewise.
        optimizer: Likewise.

    Raises:
        ValueError: As for :func:`generate_plan`.

    Example:
        >>> plans = generate_plans(nn.Linear(8, 8), world_size=2, cluster="h200")
        >>> plans[0].data_parallel.size
        2
    """
    if top < 1:
        raise ValueError(f"expected top to be a positive integer, got {top!r}")
    found = _search(model, constraints, top, world_size, cluster, example_batch, optimizer)
    others = runners_up(found.result, top - 1)
    return (found.plan, *(_fill_in(each, found.search) for each in others))


def explain_plan(
    model: nn.Module,
    constraints: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
    cluster: Cluster | str | None = None,
    example_batch: Any = None,
    optimizer: str | type = "adamw",
) -> Explanation:
    """Choose like :func:`generate_plan`, and say all that is known of the choice.

    It searches some more: for a larger batch, faster links, more memory and fewer ranks, whose
    plans are priced, not tried.

    Args:
        model: As for :func:`generate_plan`, as all others.
        constraints: Likewise.
        world_size: Likewise.
        cluster: Likewise.
        example_batch: Likewise.
        optimizer: Likewise.

    Raises:
        ValueError: As for :func:`generate_plan`.

    Example:
        >>> found = explain_plan(nn.Linear(8, 8), world_size=2, cluster="h200")
        >>> found.plan.data_parallel.size, found.to_html()[:15]
        (2, '<!doctype html>')
    """
    found = _search(model, constraints, 1, world_size, cluster, example_batch, optimizer)
    return explanation(found.plan, found.result, found.search, found.world_size)


@dataclass(frozen=True)
class _Found:
    """What a search came to, and the plan of its first candidate."""

    plan: ParallelPlan
    result: SearchResult
    search: Search
    world_size: int


def _search(
    model: nn.Module,
    constraints: Mapping[str, Any] | None,
    top: int,
    world_size: int | None,
    cluster: Cluster | str | None,
    example_batch: Any,
    optimizer: str | type,
) -> _Found:
    """Search, leave out what does not run, and write the plan down with its reasons."""
    model, constraints = in_order(model, constraints)
    check(constraints, model)
    world_size = _world_size() if world_size is None else world_size
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]: user input
        raise ValueError(f"expected world_size to be a positive integer, got {world_size!r}")
    begin, states = time.perf_counter(), optimizer_states(optimizer)
    cluster = as_cluster(cluster, world_size)
    search = _prepared(model, constraints, cluster, states, example_batch)
    contexts = priced_contexts(search, world_size)
    found, result, told_of = _found(search, world_size, top - 1)
    accumulates = ACCUMULATION not in constraints and not _has_batch_norm(model)
    if not result.fits and accumulates and not search.accumulates:
        # Only now: forward has to return its loss then, which was not seen.
        accumulating = _found(replace(search, accumulates=True), world_size, top - 1)
        found, result, told_of = accumulating if accumulating[1].fits else (found, result, told_of)
    search = found
    if not result.fits:
        sliced = _runnable(contexts.instead_of(result), search, top - 1)
        if not sliced.fits:
            refused = [each for each in sliced.rejected if each not in result.rejected]
            raise ValueError("; ".join([_no_plan(result, search, world_size), *refused[:1]]))
        result = sliced
    plan = _fill_in(result.fits[0], search)
    proposal = search.proposals.get(plan.tensor_parallel.size)
    whole = left_whole(proposal.left_whole if proposal else {})
    told = reasons(result, search.workload, cluster, constraints, search.split_method)
    if accumulates:
        whole = [*said_of_returned_loss(search, result.fits[0], world_size), *whole]
    told = (*told[:1], *told_of, *told[1:], *said_of_contexts(contexts, result.fits[0]), *whole)
    _tell(result, cluster, time.perf_counter() - begin, contexts.num_scored)
    return _Found(replace(plan, reasons=told), result, search, world_size)


def _prepared(
    model: nn.Module,
    constraints: Mapping[str, Any],
    cluster: Cluster,
    states: int,
    example_batch: Any,
) -> Search:
    """Return a search that has scored nothing yet."""
    workload = workload_of(
        model, example_batch, constraints.get("pipeline_parallel.block_calls", ())
    )
    check_split_points(constraints, workload, type(model).__name__)
    split: SplitMethod = constraints.get(
        "pipeline_parallel.split_method", "flops" if workload.observed else "uniform"
    )
    itemsize = itemsize_of(constraints.get("precision.param"), workload.itemsize)
    workload = computed_in(workload, itemsize)
    accumulates = ACCUMULATION not in constraints and not _has_batch_norm(model)
    return Search(
        model,
        workload,
        cluster,
        constraints,
        states,
        split,
        example_batch,
        accumulates=accumulates and workload.returns_loss,
    )


def _tell(result: SearchResult, cluster: Cluster, taken: float, num_priced: int) -> None:
    best = result.fits[0]
    _log.info("chose %s for %s, in %.1f s", best.candidate, cluster.name, taken)
    counts = len(result.fits), len(result.too_large), len(result.rejected)
    _log.debug("%d candidates fit, %d are too large; %d reasons against others", *counts)
    _log.debug("%d with context parallelism were priced besides", num_priced)
    if _log.isEnabledFor(logging.DEBUG):
        for each in result.fits[:_LOGGED]:
            _log.debug("%s: %s", each.candidate, each.cost)


def _found(
    search: Search, world_size: int, num_returned: int
) -> tuple[Search, SearchResult, list[str]]:
    """Return a search, what runs of what it found, and what to say of a sharded sequence.

    The sequence is sharded where that is faster: of plans without, none has to be tried then.
    """
    without = search.run(world_size)
    cut = with_sequence(search, without)
    if cut is not None:
        tried = _runnable(cut[1], cut[0], num_returned)
        if is_faster(tried, without):
            return cut[0], tried, [said_of_sequence(tried.fits[0], without)]
    return search, _runnable(without, search, num_returned), []


def _runnable(result: SearchResult, search: Search, num_returned: int) -> SearchResult:
    return runnable(
        result,
        search,
        lambda each: _fill_in(each, search, search.likely_sharding(each.candidate.layout.tp)),
        num_returned=num_returned,
    )


def _has_batch_norm(model: nn.Module) -> bool:
    """Whether a module normalizes over the batch, which then cannot run in parts."""
    return any(base.__name__ == "_BatchNorm" for m in model.modules() for base in type(m).__mro__)


def _world_size() -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return max(1, torch.cuda.device_count())


def _fill_in(
    scored: ScoredCandidate, search: Search, sharding: dict[str, str] | str | None = None
) -> ParallelPlan:
    """Return the plan that a candidate stands for; its sharding plan is proven, or given."""
    candidate = scored.candidate
    layout = candidate.layout
    sharding = search.sharding(layout.tp) if sharding is None else sharding
    names, starts = search.workload.block_names, search.starts(candidate)
    chosen: dict[str, Any] = {
        "tensor_parallel.size": layout.tp,
        "tensor_parallel.sharding_plan": sharding,
        "tensor_parallel.sharding_policy": "auto",
        "tensor_parallel.proven_calls": _proven_calls(search, layout.tp),
        "pipeline_parallel.size": layout.pp,
        "pipeline_parallel.schedule": candidate.schedule,
        "pipeline_parallel.virtual_stages": candidate.virtual_stages,
        "pipeline_parallel.microbatches": candidate.microbatches,
        "data_parallel.size": layout.dp,
        "context_parallel.size": layout.cp,
        "expert_parallel.size": layout.ep,
        "data_parallel.replicate_size": candidate.replicate,
        "data_parallel.zero_stage": candidate.zero_stage,
        "recompute": recompute_of(candidate.recompute, candidate.recomputed, names, starts),
        ACCUMULATION: candidate.accumulation,
    }
    if candidate.shares_state:
        chosen[SHARE_STATE] = 1
    if not candidate.reshards:
        chosen[RESHARD] = False
    if layout.pp > 1:
        chosen["pipeline_parallel.split_method"] = search.split_method
        chosen["pipeline_parallel.split_points"] = tuple(names[start] for start in starts[1:])
        chosen["pipeline_parallel.head_modules"] = search.workload.head_modules
        chosen["pipeline_parallel.tail_modules"] = search.workload.tail_modules
        chosen["pipeline_parallel.called_behind"] = search.workload.called_behind
        chosen["pipeline_parallel.block_calls"] = search.workload.block_calls
    if "tensor_parallel.sharding_plan" in search.constraints:
        chosen["tensor_parallel.sharding_policy"] = "manual"
    if "pipeline_parallel.split_points" in search.constraints:
        chosen["pipeline_parallel.split_method"] = "manual"
    plan = with_constraints(ParallelPlan(), {**chosen, **search.constraints})
    return replace(plan, model=model_signature(search.model), estimate=_estimate(scored, search))


def _estimate(scored: ScoredCandidate, search: Search) -> Estimate:
    workload, candidate = search.workload, scored.candidate
    samples = candidate.layout.dp * candidate.rows
    itemsize = itemsize_of(search.constraints.get("precision.param"), workload.itemsize)
    return Estimate(
        step_seconds=scored.step_seconds,
        memory_bytes=scored.needed_bytes,
        samples=samples,
        tokens=samples * workload.tokens if workload.tokens > 1 else None,
        # Backward takes twice the flops of forward.
        flops=3 * samples * workload.flops or None,
        peak_flops_per_second=search.cluster.flops_per_second_of(itemsize),
        device=search.cluster.name,
        is_assumed=not workload.observed,
    )


def _proven_calls(search: Search, size: int) -> tuple[str, ...]:
    return search.proposals[size].proven_calls(size) if size in search.proposals else ()


def _no_plan(result: SearchResult, search: Search, world_size: int) -> str:
    """Return why there is no plan at all."""
    conflict = conflict_of(search, world_size)
    excluded = f"; {said(conflict, search.constraints)}" if conflict else ""
    if not result.too_large:
        why = result.rejected[0] if len(result.rejected) == 1 else "; ".join(result.rejected[:4])
        return f"no plan obeys the constraints: {why}{excluded}"
    return nothing_fits(result, search.cluster, _helpers(result, search)) + excluded


def _helpers(result: SearchResult, search: Search) -> dict[str, Memory]:
    """Return what could be changed about the smallest candidate, and its memory then."""
    least = result.too_large[0].candidate
    helpers: dict[str, Memory] = {}
    if least.recompute != "full":
        helpers["recompute 'full'"] = search.score(
            replace(least, recompute="full", recomputed=1.0)
        ).memory
    if least.layout.dp > 1 and least.zero_stage < 3:
        helpers["data_parallel.zero_stage 3"] = search.score(replace(least, zero_stage=3)).memory
    if least.layout.tp > 1 and not search.sequence:
        helpers["tensor_parallel.sequence True"] = search.with_sequence().score(least).memory
    if least.rows > least.parts:
        fewer = replace(least, rows=least.parts)
        helpers["one row of the batch a micro-batch"] = search.score(fewer).memory
    if search.states:
        frugal = replace(search, states=0)
        helpers["optimizer 'sgd'"] = frugal.score(least).memory
    for factor in (2, 4, 8, 16, 32, 64):
        layout = replace(least.layout, dp=least.layout.dp * factor)
        more = search.score(replace(least, layout=layout, zero_stage=3))
        if more.needed_bytes <= search.cluster.memory_bytes:
            change = f"{factor} times the ranks with data_parallel.size {layout.dp}, zero_stage 3"
            helpers[change] = more.memory
            break
    return helpers
