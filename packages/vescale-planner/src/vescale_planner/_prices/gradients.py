"""How many bytes gradients take at each of the moments that memory is counted at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vescale_planner._partition import PipelineRank

from .columns import Columns, Numerics, Values, of_each


def gradients_of(
    columns: Columns,
    owned: Sequence[PipelineRank],
    numerics: Numerics,
    all_in_flight: NDArray[np.bool_],
) -> tuple[Values, ...]:
    """Return the bytes of gradients and their buffers at every moment, in the order of moments.

    Args:
        columns: The candidates.
        owned: What some pipeline ranks own.
        numerics: Dtypes, and whether buffers are kept.
        all_in_flight: Whether all micro-batches of a step are, before the first has its backward.
    """
    nbytes = of_each(owned, lambda own: own.trained_bytes)
    shard = nbytes / columns.state_shard
    sums = _share_of_sums(owned, nbytes, numerics)
    sent, received = (each * sums for each in _buffers(columns, owned))
    # In rank order a row of each rank arrives; a backend's own sum is of this rank's row.
    rows = 1.0 if columns.first.reduction == "ordered" else 1 / columns.shard
    has_copies = columns.layout.dp * columns.layout.cp > 1
    sharded, once = (columns.zero_stage > 0) & has_copies, columns.parts == 1
    # Gradients of the last step may be cleared behind forward, and on processors the memory of
    # theirs is kept: [Note: buffers of gradients] in vescale-parallel.
    left = np.where(sharded, shard, nbytes)
    idle = np.where(numerics.keeps_buffers & has_copies, left + sent + received, 0.0)
    reduced = np.where(sharded, shard + sent + received, sums * nbytes + received)
    # Whole gradients are cast for the optimizer when all are reduced.
    cast = np.where(np.isclose(sums, 1.0) | ~has_copies, 0.0, sums * nbytes)
    given = np.where(sharded, reduced, nbytes + cast + received)
    # Those of micro-batches are added up, by ZeRO 2 and 3 outside of pipelines in shards, but of
    # what is in no block.
    scatters = (columns.zero_stage >= 2) & (columns.layout.pp == 1 or not numerics.sums_first)
    outside = of_each(owned, lambda own: own.trained_outside)
    blocks = of_each(owned, lambda own: max(own.trained_blocks, default=0.0))
    in_shards = shard + sums * outside * (1 - 1 / columns.state_shard)
    in_shards = in_shards + sums * blocks * (1 + rows)
    summed = np.where(scatters, in_shards, sums * nbytes)
    before = np.where(all_in_flight, 0.0, summed)
    at_end = sums * (nbytes + np.maximum(blocks, outside))
    at_end = np.where(sharded, at_end, np.maximum(at_end, nbytes + cast))
    at_end = np.where(scatters, in_shards, at_end)
    at_end = np.where(has_copies, at_end, nbytes)
    found = (
        np.where(once, np.maximum(left, idle), before),  # forward ends
        np.where(once, idle, before),  # backward of the loss
        np.where(once, idle, before),  # of the last block
        np.where(once, np.maximum(reduced, idle), summed),  # of the first block
        np.where(once, given, at_end),  # all are reduced
    )
    if columns.first.offload == "none":
        return found
    # Those are there until they are reduced.
    largest = np.maximum(blocks, outside)
    here = np.where((columns.zero_stage >= 2) & (nbytes > 0), largest, nbytes)
    return (here,) * len(found)


def _share_of_sums(owned: Sequence[PipelineRank], nbytes: Values, numerics: Numerics) -> Values:
    """Return how large gradients that are added up and sent are, beside an optimizer's."""
    if numerics.reduce_itemsize is None and not numerics.casts:
        return np.ones_like(nbytes)
    numel = of_each(owned, lambda own: own.trained_numel)
    itemsize = numerics.reduce_itemsize or numerics.compute_itemsize
    return np.divide(numel * itemsize, nbytes, out=np.zeros_like(nbytes), where=nbytes > 0)


def _buffers(columns: Columns, owned: Sequence[PipelineRank]) -> tuple[Values, Values]:
    """Return the bytes that gradients are sent from, beside themselves, and that they arrive in.

    Rows of what is in no block, and of a block, and of blocks that are under way while the next
    are written: one under ZeRO 1, and one for each collective with which shards' copies add up
    theirs then. What arrives, in rank order, is as large as the larger of the first two, and as
    those under way to copies, unless they share it out. Two ranks sum whole gradients in place, as
    do all that leave the order to the backend.
    """
    blocks = of_each(owned, lambda own: max(own.trained_blocks, default=0.0))
    again = of_each(owned, lambda own: sum(own.trained_blocks[1:2]))
    outside = of_each(owned, lambda own: own.trained_outside)
    in_order = columns.first.reduction == "ordered"
    num_more = np.where(columns.replicate > 1, 1 + (in_order & (columns.replicate > 2)), 0)
    sent = ((columns.zero_stage == 1) + num_more) * again + blocks + outside
    largest, num_ranks = np.maximum(blocks, outside), columns.layout.dp * columns.layout.cp
    sharded = (columns.zero_stage > 0) & (num_ranks > 1)
    to_copies = np.where(columns.shares_state, 0, num_more) * again
    if in_order:
        received = np.where(sharded, largest + to_copies, 0.0)
        received = np.where(~sharded & (num_ranks > 2), largest, received)
    else:
        received = np.where(sharded, (largest + to_copies) / columns.shard, 0.0)
    return np.where(sharded, sent, 0.0), received
