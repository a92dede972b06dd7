"""How long a step takes: a roofline, collectives by level, and the bubble of the pipeline.

    step = micro-batches x (matrix products + attention + memory-bound work + tensor-parallel
           communication + hand-over) + bubble + communication of data parallelism that nothing
           hides + optimizer

Every term is a few multiplications, so that a person can check the winner by hand. What is left
out: how the speed of a product depends on its shape, slow links shared with others, stragglers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from vescale_parallel import simulate_schedule

from ._candidates import Candidate
from ._collectives import Group, all_gather, all_reduce, exchange, send
from ._partition import LocalPart, PipelineRank
from .cluster import Cluster

# Operators of one block's forward, for the time that starting them takes.
_OPERATORS = 50
# Of matrices this wide, products reach half of what wide ones do: see ``shape_efficiency``.
_HALF_WIDTH = 256
# Backward of fused attention computes the scores again (Dao 2023): five products for two.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one step, by what they are spent on; they add up to ``step``."""

    matrix: float
    attention: float
    memory_bound: float
    tensor_parallel: float
    context_parallel: float
    bubble: float
    hand_over: float
    data_parallel: float
    optimizer: float

    @property
    def compute(self) -> float:
        """Forward and backward of the slowest pipeline rank."""
        return self.matrix + self.attention + self.memory_bound

    @property
    def pipeline(self) -> float:
        """What a pipeline adds."""
        return self.bubble + self.hand_over

    @property
    def step(self) -> float:
        """The whole step."""
        return (
            self.compute
            + self.tensor_parallel
            + self.context_parallel
            + self.pipeline
            + self.data_parallel
            + self.optimizer
        )

    def __str__(self) -> str:
        parts = {
            "matrix products": self.matrix,
            "attention": self.attention,
            "memory-bound operators": self.memory_bound,
            "tensor-parallel communication": self.tensor_parallel,
            "context-parallel communication": self.context_parallel,
            "pipeline bubble": self.bubble,
            "hand-over between stages": self.hand_over,
            "data-parallel communication not hidden": self.data_parallel,
            "optimizer": self.optimizer,
        }
        shown = {name: value for name, value in parts.items() if value > 0.001 * self.step}
        return ", ".join(f"{name} {seconds(value)}" for name, value in shown.items())


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What a plan says of dtypes, and what the optimizer keeps.

    Attributes:
        states: Tensors of a parameter's size that the optimizer keeps.
        compute_itemsize: Bytes of an element in forward and backward.
        reduce_itemsize: Of a gradient while it is summed; None as in backward.
    """

    states: int
    compute_itemsize: int
    reduce_itemsize: int | None = None


@dataclass
class _Spent:
    matrix: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0

    @property
    def compute(self) -> float:
        return self.matrix + self.attention + self.memory_bound

    @property
    def total(self) -> float:
        return self.compute + self.tensor_parallel + self.context_parallel


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
    numerics: Numerics,
) -> Cost:
    """Return the predicted time of one optimizer step.

    Args:
        candidate: The plan.
        ranks: What every pipeline rank owns.
        cluster: The machines.
        numerics: Dtypes, and what is overlapped.
    """
    parts = candidate.parts
    # Most ranks of a pipeline have as much as others.
    alike = {rank.numbers: rank for rank in ranks}
    spent = {n: _of_rank(r, candidate, cluster, numerics) for n, r in alike.items()}
    busy = [spent[rank.numbers].total for rank in ranks]
    slowest = max(range(len(ranks)), key=lambda rank: busy[rank])
    found = spent[ranks[slowest].numbers]
    return Cost(
        matrix=found.matrix * parts,
        attention=found.attention * parts,
        memory_bound=found.memory_bound * parts,
        tensor_parallel=found.tensor_parallel * parts,
        context_parallel=found.context_parallel * parts,
        bubble=_bubble(candidate, busy, slowest),
        hand_over=_hand_over(candidate, ranks, cluster) * parts,
        data_parallel=max(
            _data_parallel(candidate, rank, cluster, numerics, spent[numbers].compute)
            for numbers, rank in alike.items()
        ),
        optimizer=max(_optimizer(candidate, r, cluster, numerics.states) for r in alike.values()),
    )


def _passes(candidate: Candidate, p: LocalPart) -> int:
    """Return forwards that a part takes: backward is two, recomputation one."""
    return 4 if candidate.recompute == "full" and p.is_block else 3


def _of_rank(
    rank: PipelineRank, candidate: Candidate, cluster: Cluster, numerics: Numerics
) -> _Spent:
    """Return forward and backward of one micro-batch on a pipeline rank."""
    found = _Spent()
    for part, count in rank.kinds:
        matrix, attention, memory = _compute(part, candidate, cluster, numerics.compute_itemsize)
        found.matrix += matrix * count
        found.attention += attention * count
        found.memory_bound += memory * count
        found.tensor_parallel += _tensor_parallel(part, candidate, cluster) * count
        found.context_parallel += _context_parallel(part, candidate, cluster) * count
    return found


def _compute(
    p: LocalPart, candidate: Candidate, cluster: Cluster, itemsize: int
) -> tuple[float, float, float]:
    """Return forward and backward of one micro-batch.

    Products are the roofline of their flops and of reading parameters once a pass (Williams et
    al. 2009). Element-wise operators run before and after them, not beside: they write activations
    and read them, in each direction. Nothing is faster than starting its operators.
    """
    rows, passes = candidate.rows_of_part, _passes(candidate, p)
    peak, memory = cluster.flops_per_second_of(itemsize), cluster.reached_memory_bytes_per_second
    reached = peak * cluster.efficiency * shape_efficiency(p.width)
    arithmetic = passes * rows * (p.flops - p.attention_flops) / reached
    matrix = max(arithmetic, passes * p.numel * itemsize / memory)
    again = passes - 3
    attention = (1 + _ATTENTION_BACKWARD + again) * rows * p.attention_flops
    attention /= peak * cluster.attention_efficiency
    moved = (passes + 1) * rows * p.saved_bytes / memory
    starting = passes * _OPERATORS * cluster.launch_seconds if p.is_block else 0.0
    return matrix, attention, max(moved, starting - matrix - attention)


def shape_efficiency(width: float) -> float:
    """Return what products of matrices reach, of what very wide ones do: ``k / (k + 256)``.

    A tile of the result is added up along ``k``. Loading its first operands and writing it take as
    long as some hundred steps, whatever ``k`` is (CUTLASS, "Efficient GEMM in CUDA": prologue and
    epilogue of the main loop).
    """
    return width / (width + _HALF_WIDTH) if width else 1.0


def _bubble(candidate: Candidate, busy: list[float], slowest: int) -> float:
    """Return how long the slowest pipeline rank waits, by simulating the schedule.

    Of equal stages a rank waits ``idle_passes`` of a stage's forward and backward; of unequal
    ones, for those of the other ranks.
    """
    p, v = candidate.layout.pp, candidate.virtual_stages
    if p == 1:
        return 0.0
    others = (sum(busy) - busy[slowest]) / (p - 1)
    return idle_passes(candidate.schedule, p, v, candidate.microbatches) * others / v


def idle_passes(schedule: str, size: int, virtual_stages: int, microbatches: int) -> float:
    """Return how long a rank waits in a step, in forward and backward passes of one stage.

    The common schedules' simulations have a closed form (Narayanan et al. 2021), which tests
    compare; simulating hundreds of ranks takes seconds. Of the others no more than about four
    micro-batches a rank are simulated: more make no difference.
    """
    if schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
        return size - 1
    most = 4 * size + microbatches % size
    return _idle_passes(schedule, size, virtual_stages, min(microbatches, most))


@functools.cache
def _idle_passes(schedule: str, p: int, v: int, m: int) -> float:
    found = simulate_schedule(schedule, size=p, virtual_stages=v, microbatches=m)
    return found.seconds / 3 - m * v


def _tensor_parallel(p: LocalPart, candidate: Candidate, cluster: Cluster) -> float:
    """Return the all-reduces of one micro-batch: two a block and direction.

    With a cut sequence each is a reduce-scatter and an all-gather, which send the same bytes. In
    front of the blocks an embedding's rows are summed. Behind them the gradient of an output
    layer's input is summed; its logits stay cut, or are gathered.
    """
    layout = candidate.layout
    if layout.tp == 1 or p.share == 0.0:
        return 0.0
    group, rows = Group(layout.tp), candidate.rows_of_part
    handed = p.part.output_bytes * rows
    if p.is_block:
        count = 6 if candidate.recompute == "full" else 4
        return count * all_reduce(handed, group, cluster) if handed else 0.0
    if not p.is_last:
        return all_reduce(handed, group, cluster) if handed else 0.0
    # Of cut logits ranks exchange a few numbers a row: all latency.
    logits = 3 * all_reduce(0.0, group, cluster)
    if not p.keeps_cut:
        logits = all_gather(handed, group, cluster)
    return logits + all_reduce(p.part.input_bytes * rows, group, cluster)


def _context_parallel(p: LocalPart, candidate: Candidate, cluster: Cluster) -> float:
    """Return the all-gathers of keys and values, and of their gradients (Llama 3, sec. 3.3.2).

    As wide as what a block hands on; grouped queries make them smaller.
    """
    layout = candidate.layout
    if layout.cp == 1 or not p.is_block:
        return 0.0
    nbytes = 2 * p.part.output_bytes / layout.tp * candidate.rows_of_part * layout.cp
    times = _passes(candidate, p) - 1
    return times * all_gather(nbytes, Group(layout.cp, layout.tp), cluster)


def _hand_over(candidate: Candidate, ranks: tuple[PipelineRank, ...], cluster: Cluster) -> float:
    """Return the activation and its gradient of one micro-batch between two ranks."""
    layout = candidate.layout
    if layout.pp == 1:
        return 0.0
    group = Group(layout.pp, layout.tp * layout.cp * layout.dp)
    width = max((p.handed_bytes for p, _ in ranks[0].kinds if p.is_block), default=0.0)
    return 2 * candidate.virtual_stages * send(width * candidate.rows_of_part, group, cluster)


def _data_parallel(
    candidate: Candidate,
    owned: PipelineRank,
    cluster: Cluster,
    numerics: Numerics,
    compute_seconds: float,
) -> float:
    """Return the communication over the data-parallel ranks that nothing hides.

    What the engine does (docs/decisions/0010-overlap.md):

    - Stages 1 and 2 gather parameters once a step, before forward: not hidden.
    - Stage 3 gathers them before forward of every micro-batch and, if it frees blocks between
      them, before backward, behind the blocks before if it may prefetch.
    - A single micro-batch's gradients are reduced while its backward runs, all but those of the
      last unit. So are those of every micro-batch under stages 2 and 3 without a pipeline.
    - Otherwise they are summed over micro-batches first, and reduced after all: not hidden.
    - Copies that share out the optimizer state gather once a step what they updated: not hidden.
    """
    layout, shard = candidate.layout, candidate.shard
    if layout.dp * layout.cp == 1:
        return 0.0
    units = _units(owned)
    parts = candidate.parts
    gather, reduce = _gather_and_reduce(candidate, owned, cluster, numerics, units)
    passes = 4 if candidate.recompute == "full" else 3
    behind = cluster.overlap * (units - 1) / units * compute_seconds
    forward, backward = behind / passes, behind * (passes - 1) / passes

    def exposed(communication: float, hiding: float) -> float:
        alone = max(communication - hiding, communication / units)
        return alone + cluster.interference * (communication - alone)

    early = layout.pp == 1 and (parts == 1 or candidate.zero_stage >= 2)
    times = parts if candidate.zero_stage >= 2 else 1
    if candidate.zero_stage < 3 or shard == 1:
        once = gather if shard > 1 else 0.0
        return once + (times * exposed(reduce, backward) if early else reduce)
    again = gather if candidate.reshards else 0.0
    if not candidate.prefetch:
        gathers, hidden = parts * (gather + again), 0.0
    else:
        gathers, hidden = parts * exposed(gather, forward), again
    gathers += _gather_of_copies(candidate, owned, cluster, numerics, units)
    if early:
        return gathers + parts * exposed(hidden + reduce, backward)
    return gathers + reduce + (parts * exposed(hidden, backward) if hidden else 0.0)


def _units(owned: PipelineRank) -> int:
    """Return how many collectives all parameters take: one a block, one for all outside."""
    units = owned.distinct
    blocks = sum(p.is_block and p.numel > 0 for p in units)
    return max(1, blocks + any(not p.is_block and p.numel > 0 for p in units))


def _gather_and_reduce(
    candidate: Candidate, owned: PipelineRank, cluster: Cluster, numerics: Numerics, units: int
) -> tuple[float, float]:
    """Return the seconds to gather all parameters once, and to reduce all gradients once."""
    layout, shard = candidate.layout, candidate.shard
    numel = owned.numel
    sent = numel * numerics.compute_itemsize
    summed = numel * (numerics.reduce_itemsize or numerics.compute_itemsize)
    inner = layout.tp * layout.cp
    scatter = exchange if candidate.reduction == "ordered" else all_gather
    copies, group = layout.dp // shard, Group(shard, inner)
    gather = all_gather(sent, group, cluster, messages=units) if shard > 1 else 0.0
    reduce = scatter(summed, group, cluster, messages=units) if shard > 1 else 0.0
    of_sequence = Group(layout.cp, layout.tp)
    for replicas in (Group(copies, inner * shard), of_sequence):
        if replicas.ranks > 1:
            reduce += scatter(summed / shard, replicas, cluster, messages=units)
            if replicas is of_sequence or not candidate.shares_state:
                reduce += all_gather(summed / shard, replicas, cluster, messages=units)
    return gather, reduce


def _gather_of_copies(
    candidate: Candidate, owned: PipelineRank, cluster: Cluster, numerics: Numerics, units: int
) -> float:
    """Return the seconds in which copies that share out state get what others updated."""
    if not candidate.shares_state:
        return 0.0
    layout, shard = candidate.layout, candidate.shard
    sent = owned.numel * numerics.compute_itemsize / shard
    replicas = Group(candidate.replicate, layout.tp * layout.cp * shard)
    return all_gather(sent, replicas, cluster, messages=units)


def _optimizer(candidate: Candidate, owned: PipelineRank, cluster: Cluster, states: int) -> float:
    """Return the time to read gradients, and read and write parameters and states."""
    nbytes = owned.nbytes / candidate.state_shard
    return (3 + 2 * states) * nbytes / cluster.reached_memory_bytes_per_second
