"""How many bytes a rank needs at its fullest."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from vescale_parallel import simulate_schedule
from vescale_planner._candidates import Candidate
from vescale_planner._partition import PipelineRank
from vescale_planner.cluster import Cluster

from .columns import Columns, Counts, Numerics, Values, columns_of, of_each

# Whose memory has a closed form.
_USUAL = ("gpipe", "1f1b", "interleaved_1f1b")

# Tensors as large as the parameters that an optimizer keeps.
_OPTIMIZER_STATES = {
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "adamax": 2,
    "adagrad": 1,
    "rmsprop": 1,
    "lion": 1,
    "muon": 1,
    "sgd-momentum": 1,
    "sgd": 0,
    "adafactor": 0,
}


def optimizer_states(optimizer: str | type) -> int:
    """Return how many tensors of a parameter's size an optimizer keeps.

    Raises:
        ValueError: If the optimizer is unknown, with the known ones.
    """
    name = optimizer.__name__ if isinstance(optimizer, type) else optimizer
    if not isinstance(name, str) or name.lower() not in _OPTIMIZER_STATES:  # pyright: ignore[reportUnnecessaryIsInstance]: user input
        raise ValueError(
            f"expected optimizer to be one of {sorted(_OPTIMIZER_STATES)}, got "
            f"{name if isinstance(name, str) else type(name).__name__!r}; "  # pyright: ignore[reportUnnecessaryIsInstance]: user input
            "name the one that keeps as many tensors a parameter"
        )
    return _OPTIMIZER_STATES[name.lower()]


UNTIMED_OFFLOAD = (
    "memory on the host is not counted, nor is the time of copies from and to it, and the "
    "optimizer is timed as if it stepped on the device"
)


_Number = TypeVar("_Number", float, Values)


@dataclass(frozen=True, kw_only=True)
class Memories(Generic[_Number]):
    """Bytes of one rank by purpose, of one candidate or of many."""

    parameters: _Number
    gradients: _Number
    optimizer: _Number
    activations: _Number
    output: _Number

    @property
    def total(self) -> _Number:
        """Sum, before fragmentation."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.output


@dataclass(frozen=True, kw_only=True)
class Memory(Memories[float]):
    """Of one candidate."""


def peak_memory(
    candidate: Candidate,
    ranks: tuple[PipelineRank, ...],
    *,
    numerics: Numerics,
    output_bytes: float,
) -> Memory:
    """Return the memory of the fullest pipeline rank.

    Args:
        candidate: The plan.
        ranks: What every pipeline rank owns.
        numerics: Dtypes, and what the optimizer keeps.
        output_bytes: What the model returns for one row.
    """
    memories = memory_of_ranks(
        candidate,
        ranks,
        numerics=numerics,
        output_bytes=output_bytes,
    )
    return max(memories, key=lambda memory: memory.total)


def memory_of_ranks(
    candidate: Candidate,
    ranks: tuple[PipelineRank, ...],
    *,
    numerics: Numerics,
    output_bytes: float,
) -> tuple[Memory, ...]:
    """Return the memory of every pipeline rank; arguments as of :func:`peak_memory`."""
    columns = columns_of([candidate])
    found = _of_ranks(columns, ranks, range(len(ranks)), numerics, output_bytes)
    names = [each.name for each in fields(Memory)]
    return tuple(
        Memory(**{name: float(getattr(found, name)[rank, 0]) for name in names})
        for rank in range(len(ranks))
    )


def peaks(
    columns: Columns,
    ranks: tuple[PipelineRank, ...],
    *,
    numerics: Numerics,
    output_bytes: float,
) -> Values:
    """Return the bytes of each candidate's fullest pipeline rank; arguments likewise."""
    some = _fullest(columns.first, ranks)
    return _of_ranks(columns, ranks, some, numerics, output_bytes).total.max(axis=0)


def _fullest(first: Candidate, ranks: Sequence[PipelineRank]) -> list[int]:
    """Return the pipeline ranks of which one is the fullest.

    The usual schedules keep no more micro-batches the later a rank is, so that of ranks that own
    the same the first is the fullest; but the last one has the model's output.
    """
    if first.schedule not in _USUAL:
        return [*range(len(ranks))]
    earliest = {owned.numbers: rank for rank, owned in reversed([*enumerate(ranks)])}
    return sorted({*earliest.values(), len(ranks) - 1})


def needed_bytes(memory: Memory, cluster: Cluster) -> int:
    """Return what a device must have: fragmentation and what is reserved included."""
    return round(memory.total * cluster.fragmentation) + cluster.reserved_bytes


def needed_of_all(totals: Values, cluster: Cluster) -> Counts:
    """Return what :func:`needed_bytes` does, of each of many totals."""
    return np.rint(totals * cluster.fragmentation).astype(np.int64) + cluster.reserved_bytes


def _of_ranks(
    columns: Columns,
    ranks: Sequence[PipelineRank],
    some: Sequence[int],
    numerics: Numerics,
    output_bytes: float,
) -> Memories[Values]:
    """Return the bytes of ``some`` pipeline ranks: (ranks, candidates)."""
    owned, first = [ranks[rank] for rank in some], columns.first
    nbytes, numel = of_each(owned, lambda own: own.nbytes), of_each(owned, lambda own: own.numel)
    largest = of_each(owned, lambda own: max(own.unit_bytes, default=0.0))
    shard, zero_stage, state_shard = columns.shard, columns.zero_stage, columns.state_shard
    compute = numel * numerics.compute_itemsize
    copied = np.where(np.abs(compute - nbytes) > 1, compute, 0.0)
    # Stage 3 holds whole the parameters of the unit that runs, and of those gathered ahead.
    ahead = of_each(owned, lambda own: sum(own.unit_bytes[: first.prefetch + 1]))
    scale = np.divide(compute, nbytes, out=np.zeros_like(nbytes), where=nbytes > 0)
    whole = np.where(columns.reshards, ahead, nbytes) * scale
    gathered = np.where(shard > 1, whole, 0.0)
    # Copies that share out optimizer state keep what they gather, besides their part of what is
    # updated, which is in its place there if it computes in its own dtype.
    updated = np.where(copied > 0, nbytes / state_shard, 0.0)
    own = np.where(columns.shares_state, compute / shard + updated, nbytes / shard)
    # Gradients are whole for one unit until they are summed and scattered; those of a pipeline
    # until all micro-batches had theirs.
    sent, received = _buffers(columns, owned, largest, keeps=numerics.keeps_buffers)
    scattered = nbytes / state_shard + sent
    replicated = nbytes + copied
    if numerics.copy_itemsize is not None:
        sharded = compute + numel * numerics.copy_itemsize / shard
        replicated = np.where(zero_stage > 0, sharded, replicated)
    parameters = np.where(zero_stage == 3, own + gathered, replicated)
    scatters = (zero_stage >= 2) & (columns.layout.pp == 1 or not numerics.sums_first)
    gradients = np.where(scatters, scattered, nbytes) + received
    optimizer = numerics.states * nbytes / state_shard
    if first.offload != "none":
        # Shards in the dtype that computes stay, but those that every gather brings; gradients
        # are there until they are reduced.
        stay = 0.0 if first.offload == "parameters" else compute / shard
        parameters = np.where(zero_stage == 3, stay + whole, compute)
        gradients = np.where((zero_stage >= 2) & (nbytes > 0), largest, nbytes)
        optimizer = np.zeros_like(parameters)
    output = _outputs(columns, owned, some, output_bytes)
    return Memories(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(columns, owned, some, output),
        output=output,
    )


def _buffers(
    columns: Columns, owned: Sequence[PipelineRank], largest: Values, *, keeps: bool
) -> tuple[Values, Values]:
    """Return the bytes that gradients are sent from under ZeRO 2 and 3, and that they arrive in.

    Where buffers are kept there is one for what is outside of blocks and one for every block in
    turn; the larger one is as large as what arrives. Gradients of micro-batches are added up
    first, while nothing is kept: see ``GradientBuffers``.
    """
    sent = np.where(columns.shard > 1, largest, 0.0)
    if not keeps:
        return sent, np.zeros_like(sent)
    blocks = of_each(
        owned, lambda own: max((p.nbytes for p, _ in own.kinds if p.is_block), default=0.0)
    )
    others = of_each(owned, lambda own: sum(p.nbytes * n for p, n in own.kinds if not p.is_block))
    adds_up = (columns.parts > 1) & ((columns.zero_stage < 2) | (columns.layout.pp > 1))
    arrives = (columns.layout.dp * columns.layout.cp > 1) & ~adds_up
    received = np.where(arrives, np.maximum(blocks, others), 0.0)
    return np.where(columns.shard > 1, blocks + others, 0.0), received


def _outputs(
    columns: Columns, owned: Sequence[PipelineRank], places: Sequence[int], output_bytes: float
) -> Values:
    """Return the bytes of the output and its gradient, on the rank of the last stage."""
    # Of cut logits a rank has its part.
    parts = of_each(owned, lambda own: next((p.tp for p, _ in own.kinds if p.keeps_cut), 1))
    is_last = np.array([[rank == columns.layout.pp - 1] for rank in places])
    return np.where(is_last, 2 * (output_bytes / parts), 0.0) * columns.rows_of_part


def _activations(
    columns: Columns, owned: Sequence[PipelineRank], places: Sequence[int], output: Values
) -> Values:
    """Return the bytes kept for backward, by all micro-batches in flight."""
    rows, full, first = columns.rows_of_part, columns.recomputes, columns.first
    saved = of_each(owned, lambda own: own.saved_bytes)
    kept = np.where(full, of_each(owned, lambda own: own.recomputed_bytes), saved) * rows

    def largest_block(own: PipelineRank) -> float:
        return max((p.saved_bytes for p, _ in own.kinds if p.is_block), default=0.0)

    def behind_blocks(own: PipelineRank) -> float:
        return sum(p.saved_bytes * count for p, count in own.kinds if p.is_last)

    # Recomputation brings back one block at a time. By then the loss has been through backward:
    # what it kept is free, and so is the gradient of the output.
    again = np.where(full, of_each(owned, largest_block) * rows, 0.0)
    again = np.maximum(0.0, again - of_each(owned, behind_blocks) * rows - output / 2)

    # Of the part that runs, what came from other ranks for experts, and what they made of it.
    def sent_to_experts(own: PipelineRank) -> float:
        return max((p.part.sent_bytes for p, _ in own.kinds), default=0.0)

    sent = of_each(owned, sent_to_experts) if columns.layout.ep > 1 else 0.0
    counts, place = np.unique(columns.parts, return_inverse=True)
    p, v = columns.layout.pp, first.virtual_stages
    in_flight = np.array(
        [
            [passes_in_flight(first.schedule, rank, p, v, int(count)) for count in counts]
            for rank in places
        ]
    )[:, place]
    # Passes are spread over the virtual stages.
    stages = of_each(owned, lambda own: len(own.stages))
    return kept / stages * in_flight + again + 2 * sent * rows


def passes_in_flight(schedule: str, rank: int, p: int, v: int, m: int) -> int:
    """Return how many forward passes of one stage wait for their backward at most.

    ``gpipe`` all; ``1f1b`` one for each stage behind and itself; interleaved
    2 (p - rank - 1) + (v - 1) p + 1 (Narayanan et al. 2021); others as many as their simulation.

    Args:
        schedule: Of the pipeline.
        rank: Of it.
        p: Its size.
        v: Stages of each rank.
        m: Micro-batches of a step.
    """
    if schedule not in _USUAL:
        return _simulated(schedule, p, v, m)[rank]
    if schedule == "gpipe":
        return m
    if v == 1:
        return min(m, p - rank)
    return min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)


@functools.cache
def _simulated(schedule: str, p: int, v: int, m: int) -> tuple[int, ...]:
    return simulate_schedule(schedule, size=p, virtual_stages=v, microbatches=m).peak_activations
