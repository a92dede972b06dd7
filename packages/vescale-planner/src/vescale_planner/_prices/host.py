"""What ranks that share processors take around operators, in the time of starting some.

On GPUs that is done while others compute. What is counted was measured with models that compute
next to nothing, on ranks of one thread (docs/decisions/0096-what-is-done-around-operators.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vescale_planner._partition import LocalPart, PipelineRank
from vescale_planner.cluster import Cluster

from .columns import Columns, Values, of_each

# Operators of one block's forward.
OPERATORS = 50
# What a stage of a pipeline does around its forward and backward of a micro-batch, to send and
# receive among others.
_OF_PASS = 350
# A block that runs again: torch packs what it keeps twice, and looks whether it is the same.
_OF_RECOMPUTATION = 150
# A trained parameter: its gradient is handed out after each micro-batch, and the optimizer runs.
_OF_GRADIENT, _OF_UPDATE = 8, 7
# Its gradient is written to where it is reduced.
_OF_REDUCTION = 20
# A collective of data parallelism is started, and waited for by a thread; so is one between
# tensor-parallel layers, with what they are called with told from what they return.
_OF_COLLECTIVE, _OF_CONVERSION = 45, 100


def around_part(p: LocalPart, columns: Columns, cluster: Cluster) -> Values | float:
    """Return the seconds of a part in a micro-batch beside its operators."""
    if cluster.runs_ahead:
        return 0.0
    again = _OF_RECOMPUTATION * columns.recomputes if p.is_block else 0.0
    return (_OF_GRADIENT * p.num_trained + again) * cluster.launch_seconds


def around_pass(columns: Columns, cluster: Cluster) -> float:
    """Return the seconds of a rank in a micro-batch of a pipeline."""
    if cluster.runs_ahead or columns.layout.pp == 1:
        return 0.0
    return columns.first.virtual_stages * _OF_PASS * cluster.launch_seconds


def around_update(ranks: Sequence[PipelineRank], cluster: Cluster) -> float:
    """Return the seconds of the optimizer's step beside what it reads and writes."""
    if cluster.runs_ahead:
        return 0.0
    return _OF_UPDATE * max(rank.num_trained for rank in ranks) * cluster.launch_seconds


def around_conversions(count: Values | float, cluster: Cluster) -> Values | float:
    """Return the seconds of some collectives between tensor-parallel layers beside sending."""
    return 0.0 if cluster.runs_ahead else count * _OF_CONVERSION * cluster.launch_seconds


def while_others_compute(group: int, columns: Columns, cluster: Cluster) -> Cluster:
    """Return the machines as ranks of a group that wait for each other find them.

    Where ranks share processors, theirs are not idle meanwhile if there are other groups.
    """
    layout = columns.layout
    ranks = layout.tp * layout.pp * layout.dp * layout.cp
    if cluster.alone_speed == 1.0 or group == ranks:
        return cluster
    latency = cluster.intra_latency_seconds / cluster.alone_speed
    return replace(cluster, intra_latency_seconds=latency)


def around_reductions(
    ranks: Sequence[PipelineRank],
    collectives: Values,
    reductions: Values,
    cluster: Cluster,
) -> Values | float:
    """Return the seconds of data parallelism beside sending: nothing hides them.

    Args:
        ranks: Of the pipeline.
        collectives: In a step: (ranks, candidates).
        reductions: Of each gradient in a step.
        cluster: The machines.
    """
    if cluster.runs_ahead:
        return 0.0
    gradients = of_each(ranks, lambda owned: owned.num_trained) * reductions
    counted = _OF_COLLECTIVE * collectives + _OF_REDUCTION * gradients
    return counted * cluster.launch_seconds
