"""What shares the sequences of a plan among ranks: calls on slices, which draw by their place."""

from __future__ import annotations

from typing import Any

from torch import nn

from vescale_parallel._cross_replica.context.blocks import SlicedBlocks
from vescale_parallel._cross_replica.context.guard import ContextGuard
from vescale_parallel._plan.plan import ParallelPlan

from .known_draws import Place
from .sharded_rng import ShardedRng


def planned_context(plan: ParallelPlan, model: nn.Module, batch: Any) -> ContextGuard | None:
    """Return what runs calls on slices of their sequences, None if ranks share none.

    Args:
        plan: The plan.
        model: Still whole.
        batch: An example, with which the model on slices is compared with one device now; None
            to compare the first call.

    Raises:
        ValueError: If the model on slices of the example is another function.
    """
    context = plan.context_parallel
    if context.size == 1:
        return None

    def draws_by(sliced: SlicedBlocks) -> ShardedRng:
        return ShardedRng(Place.alone(), {}, None, sliced)

    how = context.method, context.outputs
    return ContextGuard(model, context.size, batch, draws_by, *how)
