"""The split points that a split method finds for a model, seen in a run on an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._trace.fake_tensors import ObservationError
from vescale_parallel._trace.observation import Observation
from vescale_parallel._trace.observe import observe

from .block_calls import called_blocks, names_of_calls
from .partition import stage_starts
from .stage_costs import PartCost, StageRule, balanced_starts


def with_split_points(
    plan: ParallelPlan,
    model: nn.Module,
    batch: Any,
    outside: Mapping[str, tuple[int, ...]],
    *,
    global_size: int | None = None,
) -> ParallelPlan:
    """Return a plan with the split points that its split method finds. Nobody communicates.

    A plan that has them, or has one stage, is returned as it is.

    Args:
        plan: How many stages, and what is to be even over them.
        model: Real, on the meta device, or deferred; not changed.
        batch: An example, of any number of rows; None if there is none.
        outside: How many blocks are called before each call of the outermost modules outside.
        global_size: Rows of a step over all ranks, where the plan does not say it; None if nobody
            does: a micro-batch is as large as the example then.

    Raises:
        ValueError: If there are more stages than blocks, or the method counts what a forward
            does and none can be seen.
    """
    pipeline = plan.pipeline_parallel
    if pipeline.num_stages == 1 or pipeline.split_points or pipeline.split_method == "manual":
        return plan
    blocks, names = called_blocks(plan, model), names_of_calls(plan, model)
    # Says what is wrong with the number of stages before anything runs.
    stage_starts(_uniform(plan), model, names)
    if pipeline.split_method == "uniform":
        return plan
    needs_run = pipeline.split_method != "parameters"
    observation = (
        _observed(plan, model, batch, blocks) if needs_run else observe(model, None, blocks)
    )
    size = plan.batch.global_size or global_size
    rows = observation.rows
    if size is not None:
        rows = size / (plan.data_parallel.size * plan.num_microbatches)
    costs = _costs(observation, rows, _sizes(model, blocks, outside))
    starts = balanced_starts(costs[0], costs[1:-1], costs[-1], StageRule.of(plan))
    points = tuple(names[start] for start in starts[1:])
    return replace(plan, pipeline_parallel=replace(pipeline, split_points=points))


def _uniform(plan: ParallelPlan) -> ParallelPlan:
    return replace(plan, pipeline_parallel=replace(plan.pipeline_parallel, split_method="uniform"))


def _observed(
    plan: ParallelPlan, model: nn.Module, batch: Any, blocks: tuple[str, ...]
) -> Observation:
    method = f"pipeline_parallel.split_method {plan.pipeline_parallel.split_method!r}"
    instead = "or use split_method 'parameters', or give pipeline_parallel.split_points"
    if batch is None:
        raise ValueError(
            f"{method} counts what a forward of {type(model).__name__} does, and no example of a "
            "batch is known: give parallelize a dataset (or generate_plan an example_batch), "
            f"{instead}"
        )
    try:
        return observe(model, batch, blocks)
    except ObservationError as error:
        raise ValueError(
            f"{method} counts what a forward of {type(model).__name__} does, which could not be "
            f"run without memory ({error}); {instead}"
        ) from error


def _sizes(
    model: nn.Module, blocks: tuple[str, ...], outside: Mapping[str, tuple[int, ...]]
) -> list[PartCost]:
    """Return the parameters of what runs before the blocks, of each block, and of what follows.

    What runs between two blocks counts with the one before it; a parameter that several parts
    use counts in each.
    """
    ends = len(blocks) + 1
    places: dict[str, tuple[int, ...]] = {}
    for index, fqn in enumerate(blocks):
        places[fqn] = (*places.get(fqn, ()), index + 1)
    for fqn, behind in outside.items():
        places[fqn] = tuple(ends if count == len(blocks) else count for count in behind)
    found, counted = [PartCost() for _ in range(ends + 1)], set[tuple[int, int]]()
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        inside = (place for module, place in places.items() if fqn.startswith(f"{module}."))
        # Held by a module around the blocks: its forward may use it before or after them.
        for place in next(inside, (0, ends)):
            if (place, id(parameter)) in counted:
                continue
            counted.add((place, id(parameter)))
            numel = parameter.numel()
            found[place] += PartCost(numel=numel, nbytes=numel * parameter.element_size())
    return found


def _costs(seen: Observation, rows: float, sizes: list[PartCost]) -> list[PartCost]:
    """Return what parts cost for a micro-batch of so many rows."""
    factor = rows / max(1, seen.rows)
    ran = [
        (seen.before_flops, seen.before_saved_bytes, 0),
        *((each.flops, each.saved_bytes, each.output_bytes) for each in seen.blocks),
        (seen.after_flops, seen.after_saved_bytes, 0),
    ]
    return [
        size
        + PartCost(flops=flops * factor, saved_bytes=saved * factor, output_bytes=output * factor)
        for size, (flops, saved, output) in zip(sizes, ran, strict=True)
    ]
