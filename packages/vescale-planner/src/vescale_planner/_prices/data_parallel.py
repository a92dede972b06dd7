"""What of data-parallel communication nothing hides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vescale_planner._partition import PipelineRank
from vescale_planner.cluster import Cluster

from .collectives import Group, all_gather, exchange
from .columns import Columns, Counts, Numerics, Values, of_each
from .host import around_reductions


def exposed_data_parallel(
    columns: Columns,
    ranks: Sequence[PipelineRank],
    cluster: Cluster,
    numerics: Numerics,
    compute_seconds: Values,
) -> Values:
    """Return the communication over the data-parallel ranks that nothing hides, by pipeline rank.

    What the engine does (docs/decisions/0010-overlap.md):

    - Stages 1 and 2 gather parameters once a step, before forward: not hidden.
    - Stage 3 gathers them before forward of every micro-batch and, if it frees blocks between
      them, before backward, behind the blocks before if it may prefetch.
    - A single micro-batch's gradients are reduced while its backward runs, all but those of the
      last unit. So are those of every micro-batch under stages 2 and 3 without a pipeline.
    - Otherwise they are summed over micro-batches first, and reduced after all: not hidden. So
      are those of models whose experts ranks share, without ZeRO and under stage 1.
    - Copies that share out the optimizer state gather once a step what they updated: not hidden.

    Args:
        columns: The candidates.
        ranks: Of the pipeline; those that are to be priced.
        cluster: The machines.
        numerics: Dtypes.
        compute_seconds: Of one micro-batch, a row for each of these ranks.
    """
    layout, parts = columns.layout, columns.parts
    if layout.dp * layout.cp == 1:
        return np.zeros_like(compute_seconds)
    units = of_each(ranks, _units)
    gather, reduce = _gather_and_reduce(columns, ranks, cluster, numerics, units)
    passes = columns.passes_of_block
    behind = cluster.overlap * (units - 1) / units * compute_seconds
    forward, backward = behind / passes, behind * (passes - 1) / passes

    def exposed(communication: Values, hiding: Values) -> Values:
        alone = np.maximum(communication - hiding, communication / units)
        return alone + cluster.interference * (communication - alone)

    scatters = columns.zero_stage >= 2
    # Ranks whose experts got no token have no gradients to start a reduction by (decision 17).
    early = ((parts == 1) & (layout.ep == 1) | scatters) & (layout.pp == 1)
    reduced = np.where(early, np.where(scatters, parts, 1) * exposed(reduce, backward), reduce)
    again = np.where(columns.reshards, gather, 0.0)
    if columns.first.prefetch:
        gathers, hidden = parts * exposed(gather, forward), again
    else:
        gathers, hidden = parts * (gather + again), np.zeros_like(gather)
    gathers = gathers + _gather_of_copies(columns, ranks, cluster, numerics, units)
    both = parts * exposed(hidden + reduce, backward)
    apart = reduce + np.where(hidden > 0, parts * exposed(hidden, backward), 0.0)
    of_stage_3 = gathers + np.where(early, both, apart)
    is_gathered_once = (columns.zero_stage < 3) | (columns.shard == 1)
    sent = np.where(is_gathered_once, gather + reduced, of_stage_3)
    reductions = np.where(early & scatters, parts, 1)
    gathered = np.where(is_gathered_once, columns.shard > 1, parts * (1 + columns.reshards))
    collectives = units * (gathered + reductions)
    return sent + around_reductions(ranks, collectives, reductions, cluster)


def _units(owned: PipelineRank) -> int:
    """Return how many collectives all parameters take: one a block, one for all outside."""
    units = owned.distinct
    blocks = sum(p.is_block and p.numel > 0 for p in units)
    return max(1, blocks + any(not p.is_block and p.numel > 0 for p in units))


def _gather_and_reduce(
    columns: Columns,
    ranks: Sequence[PipelineRank],
    cluster: Cluster,
    numerics: Numerics,
    units: Values,
) -> tuple[Values, Values]:
    """Return the seconds to gather all parameters once, and to reduce all gradients once.

    Ranks that share sequences are next to each other on the axis that shards, or the one that
    replicates where nothing is sharded. Experts have no copies on ranks that share them: what is
    none is summed over these, then everything over the copies of the experts, which there are
    without ZeRO alone. Experts are in collectives of their own.
    """
    layout, shard, first = columns.layout, columns.shard, columns.first
    trained = of_each(ranks, lambda owned: owned.trained_numel)
    experts = of_each(ranks, lambda owned: owned.expert_numel)
    # Stages 1 and 2 gather what a step has changed.
    every = of_each(ranks, lambda owned: owned.numel)
    sent = np.where(columns.zero_stage == 3, every, trained) * numerics.compute_itemsize
    itemsize = numerics.reduce_itemsize or numerics.compute_itemsize
    scatter = exchange if first.reduction == "ordered" else all_gather
    group = Group(shard, columns.stride_of_shards)
    both = units + of_each(ranks, lambda owned: sum(p.expert_numel > 0 for p in owned.distinct))
    gather = np.where(shard > 1, all_gather(sent, group, cluster, messages=both), 0.0)
    summed = trained * itemsize
    reduce = np.where(shard > 1, scatter(summed, group, cluster, messages=both), 0.0)

    def of_copies(nbytes: Values, copies: Counts, stride: Counts, messages: Values) -> Values:
        replicas = Group(copies, stride)
        once = scatter(nbytes / shard, replicas, cluster, messages=messages)
        if not columns.shares_state.all():
            gathered = all_gather(nbytes / shard, replicas, cluster, messages=messages)
            once = once + np.where(columns.shares_state, 0.0, gathered)
        return np.where(copies > 1, once, 0.0)

    copies = layout.dp * layout.cp // (shard * layout.ep)
    reduce = reduce + of_copies(summed, copies, layout.tp * layout.ep * shard, both)
    if layout.ep > 1:
        sharing, apart = np.full_like(shard, layout.ep), columns.stride_of_experts
        reduce = reduce + of_copies(summed - experts * itemsize, sharing, apart, units)
    return gather, reduce


def _gather_of_copies(
    columns: Columns,
    ranks: Sequence[PipelineRank],
    cluster: Cluster,
    numerics: Numerics,
    units: Values,
) -> Values:
    """Return the seconds in which copies that share out state get what others updated."""
    shard = columns.shard
    if not columns.shares_state.any():
        return np.zeros(len(shard))
    sent = of_each(ranks, lambda owned: owned.trained_numel) * numerics.compute_itemsize / shard
    replicas = Group(columns.replicate, columns.layout.tp * shard)
    gathered = all_gather(sent, replicas, cluster, messages=units)
    return np.where(columns.shares_state, gathered, 0.0)
