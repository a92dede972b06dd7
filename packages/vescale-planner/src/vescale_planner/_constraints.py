"""Check what a person constrained, before anything is enumerated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from vescale_parallel import (
    SCHEDULE_RULES,
    ParallelPlan,
    PipelineParallel,
    Precision,
    ShardingProposal,
    check_constraints,
    check_supported,
    propose_in_chunks,
    refuse_shared_memory,
    refuse_wrapped,
    with_constraints,
)

from ._space.candidates import REPLICATE, SHARE_STATE
from ._workload import Workload

_WITHIN_DATA = (REPLICATE, "expert_parallel.size")


def in_order(model: object, constraints: object) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and its constraints, which may be given the other way round.

    Raises:
        TypeError: If there is no model, or the constraints are no mapping.
        ValueError: If a constraint is unknown.
    """
    if isinstance(constraints, nn.Module) and not isinstance(model, nn.Module):
        model, constraints = constraints, model
    if isinstance(model, type):
        name = model.__name__
        raise TypeError(
            f"expected model to be an nn.Module, got the class {name}; construct it, "
            f"{name}(...), or without memory, vescale.deferred_init({name}, ...)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected model to be an nn.Module, got {type(model).__name__}; the order is "
            "generate_plan(model, constraints)"
        )
    given = cast("Mapping[str, Any]", {} if constraints is None else constraints)
    check_constraints(given)
    return model, {key: _dtype_by_name(key, value) for key, value in given.items()}


def _dtype_by_name(key: object, value: Any) -> Any:
    """Return how a plan calls a dtype that may be torch's; other values as they are."""
    if key not in ("precision.param", "precision.reduce"):
        return value
    name = str(key).removeprefix("precision.")
    return getattr(Precision(**{name: value}), name)


def check(constraints: Mapping[str, Any], model: nn.Module) -> None:
    """Raise for what can never be obeyed, and of a model that no plan runs.

    Raises:
        ValueError: Naming the constraint, its value, and what to do.
    """
    refuse_wrapped(model)
    refuse_shared_memory(model)
    _check_pipeline(constraints)
    others = {k: v for k, v in constraints.items() if not k.startswith("pipeline_parallel.")}
    # Which have to divide the size that is still to be chosen.
    within = [constraints[key] for key in _WITHIN_DATA if key in constraints]
    if within:
        sizes = [max(size, 1) for size in within if isinstance(size, int)]
        size, shares = math.lcm(*sizes), bool(constraints.get(SHARE_STATE))
        others = {"data_parallel.size": 2 * size if shares else size} | others
        if "data_parallel.size" not in constraints:
            others.pop("batch.global_size", None)
    with_constraints(ParallelPlan(), others)
    _check_sharding(constraints, model)


def _check_pipeline(constraints: Mapping[str, Any]) -> None:
    """Check each value alone: together they depend on what is still to be chosen."""
    prefix = "pipeline_parallel."
    given = {
        key.removeprefix(prefix): value
        for key, value in constraints.items()
        if key.startswith(prefix)
    }
    for name, value in given.items():
        if name in ("size", "microbatches", "virtual_stages") and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            raise ValueError(f"expected {prefix}{name} to be a positive integer, got {value!r}")
    virtual, schedule = given.get("virtual_stages"), given.get("schedule")
    fewest: dict[Any, int] = {
        name: rule.virtual_stages[0] for name, rule in SCHEDULE_RULES.items()
    }
    if "schedule" in given:
        PipelineParallel(schedule=given["schedule"], virtual_stages=fewest.get(schedule, 1))
    if "split_method" in given:
        PipelineParallel(split_method=given["split_method"])
    if virtual is not None and schedule is not None:
        PipelineParallel(schedule=schedule, virtual_stages=virtual)
    if given.get("split_method") == "manual" and "split_points" not in given:
        raise ValueError(
            "pipeline_parallel.split_method 'manual' needs pipeline_parallel.split_points"
        )


def _check_sharding(constraints: Mapping[str, Any], model: nn.Module) -> None:
    plan: Mapping[str, str] | None = constraints.get("tensor_parallel.sharding_plan")
    policy = constraints.get("tensor_parallel.sharding_policy")
    if policy == "manual" and plan is None:
        raise ValueError(
            "tensor_parallel.sharding_policy 'manual' needs tensor_parallel.sharding_plan"
        )
    if plan is None:
        return
    if policy not in (None, "manual"):
        raise ValueError(
            f"expected tensor_parallel.sharding_policy 'manual' with a sharding_plan, "
            f"got {policy!r}; leave one of the two out"
        )
    # Raises where a pattern matches nothing, or a placement cannot be read.
    ShardingProposal(plan=dict(plan), left_whole={}).sharded_parameters(model)


def refuses_experts(constraints: Mapping[str, Any]) -> bool:
    """Return whether ranks cannot share experts under what is constrained besides sizes.

    Asks what a plan and the runtime ask, of the smallest plan in which they do.
    """
    sizes = ("pipeline_parallel.", "tensor_parallel.", "context_parallel.", "batch.")
    given = {
        key: value
        for key, value in constraints.items()
        if not key.startswith(sizes) and not key.endswith(".size") and key != REPLICATE
    }
    given |= {"data_parallel.size": 4, "expert_parallel.size": 2}
    try:
        check_supported(with_constraints(ParallelPlan(), given), nn.Module())
    except ValueError:
        return True
    return False


def check_split_points(constraints: Mapping[str, Any], workload: Workload, name: str) -> None:
    """Raise if constrained split points are no blocks, or out of order.

    Raises:
        ValueError: Naming the point and the blocks.
    """
    points = constraints.get("pipeline_parallel.split_points")
    if points is None:
        return
    if workload.no_pipeline:
        raise ValueError(f"pipeline_parallel.split_points: {workload.no_pipeline}")
    blocks = list(workload.block_names)
    for point in points:
        if point not in blocks:
            raise ValueError(
                f"pipeline_parallel.split_points: {point!r} is no block of {name}; "
                f"blocks are {blocks[0]!r} to {blocks[-1]!r}"
            )
    starts = [0, *(blocks.index(point) for point in points)]
    if starts != sorted(set(starts)):
        raise ValueError(
            "expected pipeline_parallel.split_points in the order of the blocks, none the "
            f"first block, got {tuple(points)}"
        )


def proposal_in_chunks(
    model: nn.Module,
    policy: str,
    constraints: Mapping[str, Any],
    example_batch: Any,
    *,
    sequence: bool,
) -> ShardingProposal | str:
    """Return the sharding that all sizes share whose bits are the same, or why there is none."""
    chunks = constraints.get("numerics_chunks", ParallelPlan().numerics_chunks)
    try:
        return propose_in_chunks(
            model, policy, chunks, sequence=sequence, example_batch=example_batch
        )
    except ValueError as error:
        return str(error)
