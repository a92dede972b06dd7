"""How long a step takes: a roofline, ring collectives, and the bubble of the pipeline.

    step = pipeline(compute + tensor-parallel communication + hand-over) + data-parallel
           communication that backward does not hide + optimizer

Every term is a few multiplications, so that a person can check the winner by hand. What is
left out: attention's own efficiency, slow links shared by several groups, stragglers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ._candidates import Candidate
from ._partition import LocalPart, PipelineRank
from .cluster import Cluster

# Operators of one block's forward, for the time that starting them takes.
_OPERATORS = 50


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one step, by what they are spent on; they add up to ``step``."""

    compute: float
    tensor_parallel: float
    pipeline: float
    data_parallel: float
    optimizer: float

    @property
    def step(self) -> float:
        """The whole step."""
        return (
            self.compute
            + self.tensor_parallel
            + self.pipeline
            + self.data_parallel
            + self.optimizer
        )

    def __str__(self) -> str:
        parts = {
            "compute": self.compute,
            "tensor-parallel communication": self.tensor_parallel,
            "pipeline bubble and hand-over": self.pipeline,
            "data-parallel communication not hidden": self.data_parallel,
            "optimizer": self.optimizer,
        }
        shown = {name: value for name, value in parts.items() if value > 0.001 * self.step}
        return ", ".join(f"{name} {seconds(value)}" for name, value in shown.items())


def seconds(value: float) -> str:
    """Return a duration with three digits and a fitting unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def step_cost(
    candidate: Candidate,
    ranks: tuple[PipelineRank, ...],
    cluster: Cluster,
    *,
    states: int,
    compute_itemsize: int,
) -> Cost:
    """Return the predicted time of one optimizer step.

    Args:
        candidate: The plan.
        ranks: What every pipeline rank owns.
        cluster: The machines.
        states: Tensors of a parameter's size that the optimizer keeps.
        compute_itemsize: Bytes of an element in forward and backward.
    """
    microbatches = candidate.parts
    compute = [
        sum(_compute(p, candidate, cluster, compute_itemsize) for p in rank.parts)
        for rank in ranks
    ]
    tensor = [sum(_tensor_parallel(p, candidate, cluster) for p in r.parts) for r in ranks]
    busy = [c + t for c, t in zip(compute, tensor, strict=True)]
    slowest = max(range(len(ranks)), key=lambda rank: busy[rank])
    # Filling and draining: every other rank's micro-batch once, divided by the virtual stages.
    bubble = (sum(busy) - busy[slowest]) / candidate.virtual_stages
    hand_over = _hand_over(candidate, ranks, cluster) * microbatches
    backward = compute[slowest] * microbatches * 2 / 3
    return Cost(
        compute=compute[slowest] * microbatches,
        tensor_parallel=tensor[slowest] * microbatches,
        pipeline=bubble + hand_over,
        data_parallel=max(
            _data_parallel(candidate, rank, cluster, compute_itemsize, backward) for rank in ranks
        ),
        optimizer=max(_optimizer(candidate, rank, cluster, states) for rank in ranks),
    )


def _compute(p: LocalPart, candidate: Candidate, cluster: Cluster, itemsize: int) -> float:
    """Return forward and backward of one micro-batch: the roofline, or starting operators.

    Backward takes twice the forward's flops; recomputation adds one forward.
    """
    rows = candidate.rows_of_part
    passes = 4 if candidate.recompute == "full" and p.is_block else 3
    peak = cluster.flops_per_second_of(itemsize) * cluster.efficiency
    arithmetic = passes * rows * p.flops / peak
    # Parameters are read once a pass, activations written and read in each direction.
    moved = passes * p.numel * itemsize + (passes + 1) * rows * p.saved_bytes
    starting = passes * _OPERATORS * cluster.launch_seconds if p.is_block else 0.0
    return max(arithmetic, moved / cluster.memory_bytes_per_second, starting)


def _tensor_parallel(p: LocalPart, candidate: Candidate, cluster: Cluster) -> float:
    """Return the all-reduces of one micro-batch: two a block and direction, one elsewhere.

    With a cut sequence each is a reduce-scatter and an all-gather, which send the same bytes.
    """
    tp = candidate.layout.tp
    if tp == 1 or p.share == 0.0 or p.part.output_bytes == 0.0:
        return 0.0
    if p.is_block:
        count = 6 if candidate.recompute == "full" else 4
    else:
        count = 1
    nbytes = p.part.output_bytes * candidate.rows_of_part
    return count * _all_reduce(nbytes, tp, tp, cluster)


def _hand_over(candidate: Candidate, ranks: tuple[PipelineRank, ...], cluster: Cluster) -> float:
    """Return the activation and its gradient of one micro-batch between two ranks."""
    layout = candidate.layout
    if layout.pp == 1:
        return 0.0
    span = layout.tp * layout.dp * layout.pp
    width = max((p.handed_bytes for p in ranks[0].parts if p.is_block), default=0.0)
    once = width * candidate.rows_of_part / cluster.bytes_per_second(span)
    return 2 * candidate.virtual_stages * (once + cluster.latency_seconds(span))


def _data_parallel(
    candidate: Candidate,
    owned: PipelineRank,
    cluster: Cluster,
    itemsize: int,
    backward_seconds: float,
) -> float:
    """Return the communication over the data-parallel ranks that backward does not hide.

    Stage 0 all-reduces gradients. Stages 1 and 2 reduce-scatter gradients and all-gather
    parameters: the same bytes. Stage 3 gathers before forward and, if it frees blocks between
    them, again before backward, for every micro-batch; without a pipeline gradients of stages 2
    and 3 are scattered for every one, too. Replicas of shards all-reduce what one shard holds.
    Gathers without prefetch hide nowhere.
    """
    layout, shard = candidate.layout, candidate.shard
    if layout.dp == 1:
        return 0.0
    nbytes = sum(p.numel for p in owned.parts) * itemsize
    units = max(1, len(owned.parts))
    copies = layout.dp // shard
    total, gathers, once = 0.0, 0, 0.0
    if shard > 1:
        passes = 2 if candidate.reshards else 1
        gathers = passes * candidate.parts if candidate.zero_stage == 3 else 1
        # A pipeline sums the gradients of its micro-batches first.
        scatters = candidate.parts if candidate.zero_stage >= 2 and layout.pp == 1 else 1
        once = _all_gather(nbytes, shard, layout.tp * shard, cluster, messages=units)
        total += (gathers + scatters) * once
    if copies > 1:
        span = layout.tp * layout.dp
        total += _all_reduce(nbytes / shard, copies, span, cluster, messages=units)
    # Compute waits for what is gathered when it is reached.
    waited = gathers * once if candidate.zero_stage == 3 and candidate.prefetch == 0 else 0.0
    beside = total - waited
    # The last unit's communication starts when backward is over.
    return waited + max(beside - cluster.overlap * backward_seconds, beside / units)


def _optimizer(candidate: Candidate, owned: PipelineRank, cluster: Cluster, states: int) -> float:
    """Return the time to read gradients, and read and write parameters and states."""
    nbytes = sum(p.nbytes for p in owned.parts) / candidate.shard
    return (3 + 2 * states) * nbytes / cluster.memory_bytes_per_second


def _all_gather(
    nbytes: float, ranks: int, span: int, cluster: Cluster, *, messages: int = 1
) -> float:
    """Return an all-gather or reduce-scatter: (n - 1) / n of the bytes, log2 n messages deep."""
    transfer = (ranks - 1) / ranks * nbytes / cluster.bytes_per_second(span)
    rounds = math.ceil(math.log2(ranks))
    return transfer + messages * rounds * cluster.latency_seconds(span)


def _all_reduce(
    nbytes: float, ranks: int, span: int, cluster: Cluster, *, messages: int = 1
) -> float:
    """Return a reduce-scatter and an all-gather."""
    return 2 * _all_gather(nbytes, ranks, span, cluster, messages=messages)
