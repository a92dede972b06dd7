"""How many bytes a rank needs at its fullest."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from vescale_parallel import simulate_schedule

from ._candidates import Candidate
from ._partition import PipelineRank
from .cluster import Cluster

# Reserved over allocated memory of real runs: median 1.04 to 1.11, depending on the stack.
FRAGMENTATION = 1.08

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


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank by purpose."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    output: float

    @property
    def total(self) -> float:
        """Sum, before fragmentation."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.output


def peak_memory(
    candidate: Candidate,
    ranks: tuple[PipelineRank, ...],
    *,
    states: int,
    compute_itemsize: int,
    output_bytes: float,
) -> Memory:
    """Return the memory of the fullest pipeline rank.

    Args:
        candidate: The plan.
        ranks: What every pipeline rank owns.
        states: Tensors of a parameter's size that the optimizer keeps.
        compute_itemsize: Bytes of an element in forward and backward.
        output_bytes: What the model returns for one row.
    """
    memories = memory_of_ranks(
        candidate,
        ranks,
        states=states,
        compute_itemsize=compute_itemsize,
        output_bytes=output_bytes,
    )
    return max(memories, key=lambda memory: memory.total)


def memory_of_ranks(
    candidate: Candidate,
    ranks: tuple[PipelineRank, ...],
    *,
    states: int,
    compute_itemsize: int,
    output_bytes: float,
) -> tuple[Memory, ...]:
    """Return the memory of every pipeline rank; arguments as of :func:`peak_memory`."""
    return tuple(
        _of_rank(candidate, owned, rank, states, compute_itemsize, output_bytes)
        for rank, owned in enumerate(ranks)
    )


def needed_bytes(memory: Memory, cluster: Cluster) -> int:
    """Return what a device must have: fragmentation and what is reserved included."""
    return round(memory.total * FRAGMENTATION) + cluster.reserved_bytes


def _of_rank(
    candidate: Candidate,
    owned: PipelineRank,
    rank: int,
    states: int,
    compute_itemsize: int,
    output_bytes: float,
) -> Memory:
    nbytes, numel, units = owned.nbytes, owned.numel, owned.unit_bytes
    shard, zero_stage = candidate.shard, candidate.zero_stage
    compute = numel * compute_itemsize
    copied = compute if abs(compute - nbytes) > 1 else 0.0
    scale = compute / nbytes if nbytes else 0.0
    # Stage 3 holds whole the parameters of the unit that runs, and of those gathered ahead.
    num_whole = candidate.prefetch + 1 if candidate.reshards else len(units)
    gathered = sum(units[:num_whole]) * scale if shard > 1 else 0.0
    sharded, state_shard = zero_stage == 3, candidate.state_shard
    # Copies that share out optimizer state keep what they gather, besides their part of what is
    # updated, which is in its place there if it computes in its own dtype.
    own = nbytes / shard
    if candidate.shares_state:
        own = compute / shard + (nbytes / state_shard if copied else 0.0)
    # Of cut logits a rank has its part.
    output_bytes /= next((p.tp for p, _ in owned.kinds if p.keeps_cut), 1)
    is_last = rank == candidate.layout.pp - 1
    # Gradients are whole for one unit until they are summed and scattered.
    whole_unit = units[0] if units and shard > 1 else 0.0
    parameters = own + gathered if sharded else nbytes + copied
    gradients = nbytes / state_shard + whole_unit if zero_stage >= 2 else nbytes
    optimizer = states * nbytes / state_shard
    if candidate.offload != "none":
        # Shards in the dtype that computes stay, but those that every gather brings; gradients
        # are there until they are reduced.
        stay = 0.0 if candidate.offload == "parameters" else compute / shard
        parameters = stay + sum(units[:num_whole]) * scale if sharded else compute
        gradients = units[0] if units and zero_stage >= 2 else nbytes
        optimizer = 0.0
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(candidate, owned, rank),
        # The output and its gradient, on the rank of the last stage.
        output=2 * output_bytes * candidate.rows_of_part if is_last else 0.0,
    )


def _activations(candidate: Candidate, owned: PipelineRank, rank: int) -> float:
    """Return the bytes kept for backward, by all micro-batches in flight."""
    rows = candidate.rows_of_part
    full = candidate.recompute == "full"
    kept = (owned.recomputed_bytes if full else owned.saved_bytes) * rows
    # Recomputation brings back one block at a time.
    again = max((p.saved_bytes * rows for p, _ in owned.kinds if p.is_block), default=0.0)
    in_flight = passes_in_flight(candidate, rank)
    # Passes are spread over the virtual stages.
    return kept / len(owned.stages) * in_flight + (again if full else 0.0)


def passes_in_flight(candidate: Candidate, rank: int) -> int:
    """Return how many forward passes of one stage wait for their backward at most.

    ``gpipe`` all; ``1f1b`` one for each stage behind and itself; interleaved
    2 (p - rank - 1) + (v - 1) p + 1 (Narayanan et al. 2021); others as many as their simulation.
    """
    p, v, m = candidate.layout.pp, candidate.virtual_stages, candidate.parts
    if candidate.schedule not in ("gpipe", "1f1b", "interleaved_1f1b"):
        return _simulated(candidate.schedule, p, v, m)[rank]
    if candidate.schedule == "gpipe":
        return m
    if v == 1:
        return min(m, p - rank)
    return min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)


@functools.cache
def _simulated(schedule: str, p: int, v: int, m: int) -> tuple[int, ...]:
    return simulate_schedule(schedule, size=p, virtual_stages=v, microbatches=m).peak_activations
