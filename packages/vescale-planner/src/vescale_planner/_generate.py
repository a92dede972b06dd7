"""The planner's one function."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vescale_parallel import Estimate, ParallelPlan, model_signature, with_constraints

from ._candidates import ACCUMULATION
from ._constraints import check, check_split_points
from ._explain import left_whole, nothing_fits, reasons
from ._memory import Memory, optimizer_states
from ._runnable import runnable
from ._search import ScoredCandidate, Search, SearchResult
from ._workload import workload_of
from .cluster import Cluster


def generate_plan(
    model: nn.Module,
    constraints: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
    cluster: Cluster | None = None,
    example_batch: Any = None,
    optimizer: str = "adamw",
) -> ParallelPlan:
    """Choose how to run a model on many ranks. Communicates nothing and allocates nothing.

    Every combination of tensor, pipeline and data-parallel sizes, ZeRO stage, schedule and
    micro-batches that the constraints and the model allow is scored by a memory and a cost
    model. The plan is a function of the arguments, so every rank makes the same one.

    Args:
        model: Real, on the meta device, or deferred.
        constraints: Dotted key to value, see ``vescale_parallel.constraint_keys()``. Each is
            obeyed exactly.
        world_size: Ranks; by default ``WORLD_SIZE``, else the number of GPUs, else 1.
        cluster: The machines; by default what this one has.
        example_batch: What one data-parallel rank gives the model in a step. Flops and
            activations are then observed, otherwise estimated from the parameters.
        optimizer: Name of the optimizer, for its memory.

    Raises:
        ValueError: If a constraint is unknown or cannot be obeyed, no sizes multiply to the
            world size, or nothing fits in memory.

    Example:
        >>> plan = generate_plan(nn.Linear(8, 8), world_size=2, cluster=Cluster.preset("h200"))
        >>> plan.data_parallel.size
        2
    """
    constraints = {} if constraints is None else dict(constraints)
    check(constraints, model)
    world_size = _world_size() if world_size is None else world_size
    if isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"expected world_size to be a positive integer, got {world_size!r}")
    states = optimizer_states(optimizer)
    cluster = Cluster.of_this_machine(world_size) if cluster is None else cluster
    workload = workload_of(model, example_batch)
    check_split_points(constraints, workload, type(model).__name__)
    split = constraints.get(
        "pipeline_parallel.split_method", "flops" if workload.observed else "uniform"
    )
    search = Search(model, workload, cluster, constraints, states, split, example_batch)
    result = _found(search, world_size)
    if not result.fits and ACCUMULATION not in constraints and not _has_batch_norm(model):
        # Only now: forward has to return its loss then.
        accumulating = _found(replace(search, accumulates=True), world_size)
        result = accumulating if accumulating.fits else result
    if not result.fits:
        raise ValueError(_no_plan(result, search))
    plan = _fill_in(result.fits[0], search)
    said = reasons(result, workload, cluster, constraints, split)
    proposal = search.proposals.get(plan.tensor_parallel.size)
    return replace(plan, reasons=(*said, *left_whole(proposal.left_whole if proposal else {})))


def _found(search: Search, world_size: int) -> SearchResult:
    return runnable(search.run(world_size), search, lambda each: _fill_in(each, search))


def _has_batch_norm(model: nn.Module) -> bool:
    """Whether a module normalizes over the batch, which then cannot run in parts."""
    return any(base.__name__ == "_BatchNorm" for m in model.modules() for base in type(m).__mro__)


def _world_size() -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return max(1, torch.cuda.device_count())


def _fill_in(scored: ScoredCandidate, search: Search) -> ParallelPlan:
    """Return the plan that a candidate stands for."""
    candidate = scored.candidate
    layout = candidate.layout
    chosen: dict[str, Any] = {
        "tensor_parallel.size": layout.tp,
        "tensor_parallel.sharding_plan": search.sharding(layout.tp),
        "tensor_parallel.sharding_policy": "auto",
        "tensor_parallel.proven_calls": _proven_calls(search, layout.tp),
        "pipeline_parallel.size": layout.pp,
        "pipeline_parallel.schedule": candidate.schedule,
        "pipeline_parallel.virtual_stages": candidate.virtual_stages,
        "pipeline_parallel.microbatches": candidate.microbatches,
        "data_parallel.size": layout.dp,
        "data_parallel.replicate_size": candidate.replicate,
        "data_parallel.zero_stage": candidate.zero_stage,
        "recompute": candidate.recompute,
        ACCUMULATION: candidate.accumulation,
    }
    if layout.pp > 1:
        names = search.workload.block_names
        chosen["pipeline_parallel.split_method"] = search.split_method
        chosen["pipeline_parallel.split_points"] = tuple(
            names[start] for start in search.starts(candidate.stages)[1:]
        )
        chosen["pipeline_parallel.tail_modules"] = search.workload.tail_modules
    if "tensor_parallel.sharding_plan" in search.constraints:
        chosen["tensor_parallel.sharding_policy"] = "manual"
    if "pipeline_parallel.split_points" in search.constraints:
        chosen["pipeline_parallel.split_method"] = "manual"
    plan = with_constraints(ParallelPlan(), {**chosen, **search.constraints})
    estimate = Estimate(step_seconds=scored.cost.step, memory_bytes=scored.needed_bytes)
    return replace(plan, model=model_signature(search.model), estimate=estimate)


def _proven_calls(search: Search, size: int) -> tuple[str, ...]:
    return search.proposals[size].proven_calls(size) if size in search.proposals else ()


def _no_plan(result: SearchResult, search: Search) -> str:
    """Return why there is no plan at all."""
    if not result.too_large:
        why = result.rejected[0] if len(result.rejected) == 1 else "; ".join(result.rejected[:4])
        return f"no plan obeys the constraints: {why}"
    return nothing_fits(result, search.cluster, _helpers(result, search))


def _helpers(result: SearchResult, search: Search) -> dict[str, Memory]:
    """Return what could be changed about the smallest candidate, and its memory then."""
    least = result.too_large[0].candidate
    helpers: dict[str, Memory] = {}
    if least.recompute == "none":
        helpers["recompute 'full'"] = search.score(replace(least, recompute="full")).memory
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
