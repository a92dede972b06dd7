"""What a rank does in a step of a schedule, in order."""

from __future__ import annotations

import functools

from vescale_parallel._pipeline.schedules import Passes, actions_of, order_of_passes
from vescale_parallel._pipeline.schedules.messages import Operation, ReduceEvery, operations_of
from vescale_parallel._plan.pipeline_schedules import StagePlacement


@functools.cache
def operations_of_step(
    schedule: str,
    rank: int,
    placement: StagePlacement,
    microbatches: int,
    reduce_every: ReduceEvery = "step",
) -> tuple[Operation, ...]:
    """Return what a rank does in a step that a schedule differentiates."""
    size, virtual = placement.size, placement.virtual_stages
    shape = {"size": size, "virtual_stages": virtual, "microbatches": microbatches}
    orders = [actions_of(schedule, r, **shape) for r in range(size)]
    return operations_of(orders, rank, placement, reduce_every=reduce_every)


@functools.cache
def operations_of_passes(
    kind: Passes,
    rank: int,
    placement: StagePlacement,
    microbatches: int,
    reduce_every: ReduceEvery = "step",
) -> tuple[Operation, ...]:
    """Return what a rank does in the forward, or the backward passes alone."""
    orders = [order_of_passes(kind, r, placement, microbatches) for r in range(placement.size)]
    return operations_of(orders, rank, placement, reduce_every=reduce_every)
