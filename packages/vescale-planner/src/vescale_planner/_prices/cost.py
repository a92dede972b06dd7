"""How long a step takes: a roofline, collectives by level, and the bubble of the pipeline.

    step = micro-batches x (matrix products + attention + memory-bound work + tensor-parallel
           communication + tokens to experts + hand-over) + bubble + communication of data
           parallelism that nothing hides + optimizer

Every term is a few multiplications, so that a person can check the winner by hand. What is left
out: how the speed of a product depends on its shape, slow links shared with others, stragglers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from vescale_parallel import simulate_schedule
from vescale_planner._partition import LocalPart, PipelineRank
from vescale_planner._space.candidates import Candidate
from vescale_planner.cluster import Cluster

from . import host
from .collectives import Group, all_gather, all_reduce, exchange, send
from .columns import Columns, Numerics, Values, columns_of
from .data_parallel import exposed_data_parallel
from .expert_parallel import dispatches

# Backward of fused attention computes the scores again (Dao 2023): five products for two.
_ATTENTION_BACKWARD = 2.5
# Rows of a result that kernels of grouped products compute at once: CUTLASS's and DeepGEMM's.
_TILE_ROWS = 128


_Number = TypeVar("_Number", float, Values)


@dataclass(frozen=True, kw_only=True)
class Costs(Generic[_Number]):
    """Seconds of one step, by what they are spent on, of one candidate or of many.

    They add up to ``step``.
    """

    matrix: _Number
    attention: _Number
    memory_bound: _Number
    tensor_parallel: _Number
    context_parallel: _Number
    expert_parallel: _Number
    bubble: _Number
    hand_over: _Number
    data_parallel: _Number
    optimizer: _Number

    @property
    def compute(self) -> _Number:
        """Forward and backward of the slowest pipeline rank."""
        return self.matrix + self.attention + self.memory_bound

    @property
    def pipeline(self) -> _Number:
        """What a pipeline adds."""
        return self.bubble + self.hand_over

    @property
    def step(self) -> _Number:
        """The whole step."""
        return (
            self.compute
            + self.tensor_parallel
            + self.context_parallel
            + self.expert_parallel
            + self.pipeline
            + self.data_parallel
            + self.optimizer
        )


@dataclass(frozen=True, kw_only=True)
class Cost(Costs[float]):
    """Of one candidate."""

    def __str__(self) -> str:
        parts = {
            "matrix products": self.matrix,
            "attention": self.attention,
            "memory-bound operators": self.memory_bound,
            "tensor-parallel communication": self.tensor_parallel,
            "context-parallel communication": self.context_parallel,
            "tokens to experts and back": self.expert_parallel,
            "pipeline bubble": self.bubble,
            "hand-over between stages": self.hand_over,
            "data-parallel communication not hidden": self.data_parallel,
            "optimizer": self.optimizer,
        }
        shown = {name: value for name, value in parts.items() if value > 0.001 * self.step}
        return ", ".join(f"{name} {seconds(value)}" for name, value in shown.items())


# What the time of one micro-batch is spent on, of the fields of :class:`Costs`.
_TERMS = (
    "matrix", "attention", "memory_bound", "tensor_parallel", "context_parallel", "expert_parallel"
)  # fmt: skip


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
    """Return the predicted time of one optimizer step of one candidate."""
    costs = step_costs(columns_of([candidate]), ranks, cluster, numerics=numerics)
    return Cost(**{each.name: float(getattr(costs, each.name)[0]) for each in fields(Cost)})


def step_costs(
    columns: Columns,
    ranks: tuple[PipelineRank, ...],
    cluster: Cluster,
    *,
    numerics: Numerics,
) -> Costs[Values]:
    """Return the predicted time of one optimizer step of each candidate.

    Args:
        columns: The candidates.
        ranks: What every pipeline rank owns.
        cluster: The machines.
        numerics: Dtypes, and what is overlapped.
    """
    # Most ranks of a pipeline have as much as others.
    alike: dict[object, tuple[PipelineRank, int]] = {}
    for rank in ranks:
        first, count = alike.get(rank.numbers, (rank, 0))
        alike[rank.numbers] = first, count + 1
    kinds = [rank for rank, _ in alike.values()]
    spent = _of_micro_batch(kinds, columns, cluster, numerics)
    spent[2] += host.around_pass(columns, cluster)
    compute = spent[0] + spent[1] + spent[2]
    busy = compute + (spent[3] + spent[4] + spent[5])  # (kinds, candidates)
    whole: Values = np.zeros_like(busy[0])
    for seconds_of_rank, (_, count) in zip(busy, alike.values(), strict=True):
        whole += seconds_of_rank * count
    slowest = busy.argmax(axis=0)
    of_slowest: Values = spent[:, slowest, np.arange(len(slowest))] * columns.parts
    data_parallel = exposed_data_parallel(columns, kinds, cluster, numerics, compute)
    return Costs(
        **dict(zip(_TERMS, of_slowest, strict=True)),
        bubble=_bubble(columns, whole, busy.max(axis=0), cluster.alone_speed),
        hand_over=_hand_over(columns, ranks, cluster) * columns.parts,
        data_parallel=data_parallel.max(axis=0),
        optimizer=max(rank.stepped_bytes for rank in kinds) / columns.state_shard
        * (3 + 2 * numerics.states) / cluster.reached_memory_bytes_per_second
        + host.around_update(kinds, cluster),
    )  # fmt: skip


def _of_micro_batch(
    ranks: Sequence[PipelineRank], columns: Columns, cluster: Cluster, numerics: Numerics
) -> Values:
    """Return forward and backward of one micro-batch: (terms, ranks, candidates).

    Ranks have few kinds of parts between them, of which each is priced once.
    """
    priced: dict[object, Values] = {}
    spent = np.zeros((len(_TERMS), len(ranks), len(columns.rows)))
    for place, rank in enumerate(ranks):
        for part, count in rank.kinds:
            if part.numbers not in priced:
                priced[part.numbers] = _of_part(part, columns, cluster, numerics)
            spent[:, place] += priced[part.numbers] * count
    return spent


def _of_part(part: LocalPart, columns: Columns, cluster: Cluster, numerics: Numerics) -> Values:
    """Return forward and backward of one micro-batch: (terms, candidates)."""
    return np.stack(
        [
            *_compute(part, columns, cluster, numerics.compute_itemsize),
            _tensor_parallel(part, columns, cluster),
            _context_parallel(part, columns, cluster),
            dispatches(part, columns, cluster, _passes(columns, part)),
        ]
    )


def _passes(columns: Columns, p: LocalPart, trained: float = 1.0) -> Values:
    """Return forwards that a part takes: backward is two, recomputation one.

    Backward is one for gradients of inputs, and one for those of parameters as far as these are
    ``trained``. There is none of what no gradient comes to.
    """
    if not p.has_backward:
        return np.ones(len(columns.rows))
    if not p.is_block:
        return np.full(len(columns.rows), 2 + trained)
    return columns.passes_of_block - 1 + trained


def _compute(
    p: LocalPart, columns: Columns, cluster: Cluster, itemsize: int
) -> tuple[Values, Values, Values]:
    """Return forward and backward of one micro-batch.

    Products are the roofline of their flops and of reading parameters once a pass (Williams et
    al. 2009), those of experts apart: of them a token is multiplied by few, and all are read.
    Element-wise operators run before and after them, not beside: they write activations
    and read them, in each direction. Nothing is faster than starting its operators, which on
    processors nothing else hides.
    """
    rows, passes = columns.rows_of_part, _passes(columns, p)
    peak, memory = cluster.flops_per_second_of(itemsize), cluster.reached_memory_bytes_per_second

    def products(flops: Values, numel: float, width: float, *, of_experts: bool) -> Values:
        times = _passes(columns, p, p.part.trained_share(of_experts=of_experts))
        reached = peak * cluster.efficiency * shape_efficiency(width, cluster.half_width)
        return np.maximum(times * flops / reached, times * numel * itemsize / memory)

    if p.expert_flops:
        outside, experts = p.numel - p.experts_here, p.experts_here
        matrix = products(rows * p.products, outside, p.part.width, of_experts=False)
        of_rows = _expert_flops(p, rows)
        matrix = matrix + products(of_rows, experts, p.expert_width, of_experts=True)
    else:  # none, or nobody saw which rows they are called with
        width = p.part.width or p.expert_width
        matrix = products(rows * p.products, p.numel, width, of_experts=not p.part.width)
    backward = _ATTENTION_BACKWARD if p.has_backward else 0.0
    attention = (np.maximum(passes - 2, 1) + backward) * rows * p.attention_flops
    attention /= peak * cluster.attention_efficiency
    # What is no product runs again, too, where blocks keep these.
    others = passes + (columns.keeps_products if p.is_block and p.has_backward else 0)
    moved = (others + 1) * rows * p.saved_bytes / memory
    starting = others * (host.OPERATORS * cluster.launch_seconds if p.is_block else 0.0)
    if not cluster.runs_ahead:
        return matrix, attention, moved + starting + host.around_part(p, columns, cluster)
    return matrix, attention, np.maximum(moved, starting - matrix - attention)


def _expert_flops(p: LocalPart, rows: Values) -> Values:
    """Return the flops of experts for some rows, those of padding among them.

    A kernel computes whole tiles of rows (CUTLASS, "Efficient GEMM in CUDA"), of each expert
    apart: the last one is half full on average.
    """
    return p.expert_flops * (rows + _TILE_ROWS / 2 / p.rows_of_expert)


def shape_efficiency(width: float, half_width: float) -> float:
    """Return what products of matrices reach, of what very wide ones do: ``k / (k + half)``.

    A tile of the result is added up along ``k``. Loading its first operands and writing it take as
    long as some hundred steps, whatever ``k`` is (CUTLASS, "Efficient GEMM in CUDA": prologue and
    epilogue of the main loop).
    """
    return width / (width + half_width) if width else 1.0


def _bubble(columns: Columns, whole: Values, slowest: Values, alone_speed: float) -> Values:
    """Return how long the slowest pipeline rank waits, by simulating the schedule.

    Of equal stages a rank waits ``idle_passes`` of a stage's forward and backward; of unequal
    ones, for those of the other ranks.

    Args:
        columns: The candidates.
        whole: Seconds of a micro-batch, all pipeline ranks added up.
        slowest: Seconds of the slowest one.
        alone_speed: Of a rank while the others wait, of that while all compute.
    """
    first, p, v = columns.first, columns.layout.pp, columns.first.virtual_stages
    if p == 1:
        return np.zeros_like(whole)
    others = (whole - slowest) / (p - 1)
    counts, place = np.unique(columns.microbatches, return_inverse=True)
    idle = np.array([idle_passes(first.schedule, p, v, int(count)) for count in counts])
    return idle[place] * others / v * felt_bubble(p, alone_speed)


def felt_bubble(size: int, alone_speed: float) -> float:
    """Return what a bubble costs where ranks share processors, of what it costs elsewhere.

    While a pipeline fills and drains 1, 2, ... of its ranks compute, each as fast as its share of
    the processors lets it: ``max(1, a k / p)`` times as long as alone, if all take ``a`` times as
    long. What waiting ranks leave the others is not lost.
    """
    shared = sum(max(1.0, alone_speed * active / size) for active in range(1, size))
    return 2 / alone_speed * shared / (size - 1) - 1


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


def _tensor_parallel(p: LocalPart, columns: Columns, cluster: Cluster) -> Values:
    """Return the all-reduces of one micro-batch: two a block and direction.

    With a cut sequence each is a reduce-scatter and an all-gather, which send the same bytes. In
    front of the blocks an embedding's rows are summed. Behind them the gradient of an output
    layer's input is summed; its logits stay cut, or are gathered. Around norms that need features
    of all ranks what they are called with is gathered, and so is their result's gradient.
    """
    layout, rows = columns.layout, columns.rows_of_part
    nothing = np.zeros_like(rows)
    if layout.tp == 1 or p.share == 0.0:
        return nothing
    group = Group(layout.tp)
    cluster = host.while_others_compute(layout.tp, columns, cluster)
    handed = p.part.output_bytes * rows
    if p.is_block:
        count = 4 + 2 * columns.runs_again
        norms = nothing
        if p.gathered_bytes:
            norms = (_passes(columns, p) - 1 + columns.keeps_products) * all_gather(
                p.gathered_bytes * rows, group, cluster
            )
        if not p.part.output_bytes:
            return norms
        around = host.around_conversions(count, cluster)
        return norms + count * all_reduce(handed, group, cluster) + around
    if not p.is_last:
        return all_reduce(handed, group, cluster) if p.part.output_bytes else nothing
    # Of cut logits ranks exchange a few numbers a row: all latency.
    logits = 3 * all_reduce(nothing, group, cluster)
    if not p.keeps_cut:
        logits = all_gather(handed, group, cluster)
    return logits + all_reduce(p.part.input_bytes * rows, group, cluster)


def _context_parallel(p: LocalPart, columns: Columns, cluster: Cluster) -> Values:
    """Return what ranks that share a sequence send each other to attend, and of gradients.

    All keys and values are gathered (Llama 3, sec. 3.3.2), or travel once around a ring (Liu et
    al. 2023), which is the same bytes; or queries, keys and values become whole sequences of some
    heads, and results slices again (Jacobs et al. 2023, Ulysses).
    """
    layout, rows = columns.layout, columns.rows_of_part
    if layout.cp == 1 or not p.is_block:
        return np.zeros_like(rows)
    group, times = Group(layout.cp, layout.tp), _passes(columns, p) - 1
    keys = p.part.keys_bytes / layout.tp * rows
    if columns.first.attends == "all_to_all":
        others = 2 * p.part.output_bytes / layout.tp * rows
        return times * exchange(keys + others, group, cluster, messages=2)
    return times * all_gather(keys * layout.cp, group, cluster)


def _hand_over(columns: Columns, ranks: tuple[PipelineRank, ...], cluster: Cluster) -> Values:
    """Return the activation and its gradient of one micro-batch between two ranks."""
    layout = columns.layout
    if layout.pp == 1:
        return np.zeros_like(columns.rows_of_part)
    group = Group(layout.pp, layout.tp * layout.cp * layout.dp)
    width = max((p.handed_bytes for p, _ in ranks[0].kinds if p.is_block), default=0.0)
    sent = send(width * columns.rows_of_part, group, cluster)
    return 2 * columns.first.virtual_stages * sent
