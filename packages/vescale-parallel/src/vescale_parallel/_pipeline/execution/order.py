"""What a rank does in a step of a schedule, in order."""

from __future__ import annotations

import functools

from vescale_parallel._pipeline.schedules import actions_of, forward_order
from vescale_parallel._pipeline.schedules.messages import Operation, ReduceEvery, operations_of
from vescale_parallel._plan.pipeline_schedules import StagePlacement


@functools.cache
def operations_of_step(
    schedule: str | None,
    rank: int,
    placement: StagePlacement,
    microbatches: int,
    reduce_every: ReduceEvery = "step",
) -> tuple[Operation, ...]:
    """Return what a rank does in a step, None being forward passes alone."""
    size, virtual = placement.size, placement.virtual_stages
    if schedule is None:
        orders = [forward_order(r, placement, microbatches) for r in range(size)]
    else:
        shape = {"size": size, "virtual_stages": virtual, "microbatches": microbatches}
        orders = [actions_of(schedule, r, **shape) for r in range(size)]
    return operations_of(orders, rank, placement, reduce_every=reduce_every)
