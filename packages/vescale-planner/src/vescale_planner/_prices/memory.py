"""How many bytes a rank needs at its fullest.

[Note: phases of memory] A step is fullest at one of a few moments: when forward ends, in the
backward of the loss, in that of the last or of the first block, or where gradients that
micro-batches added up are reduced. Gradients come as activations go, so that the sum of both at
their most is more than any step needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from vescale_planner._partition import PipelineRank
from vescale_planner._space.candidates import Candidate
from vescale_planner.cluster import Cluster

from .activations import USUAL_SCHEDULES, activations_of
from .columns import Columns, Counts, Numerics, Values, columns_of, of_each
from .gradients import gradients_of

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
    if first.schedule not in USUAL_SCHEDULES:
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
    owned = [ranks[rank] for rank in some]
    activations = activations_of(columns, owned, some, output_bytes, numerics)
    gradients = gradients_of(columns, owned, numerics, activations.all_in_flight)
    # (moments, ranks, candidates)
    moments = [np.stack(np.broadcast_arrays(*each)) for each in activations.moments]
    gradients = np.stack(np.broadcast_arrays(*gradients, moments[0][0])[:-1])
    fullest = (gradients + sum(moments)).argmax(axis=0, keepdims=True)
    gradients, kept, output = (
        np.take_along_axis(each, fullest, axis=0)[0] for each in (gradients, *moments)
    )
    parameters, optimizer = _held(columns, owned, numerics)
    return Memories(
        parameters=parameters + np.zeros_like(kept),
        gradients=gradients,
        optimizer=optimizer + np.zeros_like(kept),
        activations=kept,
        output=output,
    )


def _held(
    columns: Columns, owned: Sequence[PipelineRank], numerics: Numerics
) -> tuple[Values, Values]:
    """Return the bytes of parameters and of the optimizer's states, throughout a step."""
    first = columns.first
    nbytes, numel = of_each(owned, lambda own: own.nbytes), of_each(owned, lambda own: own.numel)
    shard, zero_stage, state_shard = columns.shard, columns.zero_stage, columns.state_shard
    compute = numel * numerics.compute_itemsize if numerics.casts else nbytes
    copied = np.where(np.abs(compute - nbytes) > 1, compute, 0.0)
    # Stage 3 holds whole the parameters of the block that runs, of those gathered ahead, and of
    # what is in no block.
    ahead = of_each(owned, lambda own: sum(own.block_bytes[: first.prefetch + 1]))
    ahead = ahead + of_each(owned, lambda own: own.outside_bytes)
    scale = np.divide(compute, nbytes, out=np.zeros_like(nbytes), where=nbytes > 0)
    whole = np.where(columns.reshards, ahead, nbytes) * scale
    gathered = np.where((shard > 1) | (copied > 0), whole, 0.0)
    # Copies that share out optimizer state keep what they gather, besides their part of what is
    # updated, which is in its place there if it computes in its own dtype.
    updated = np.where(copied > 0, nbytes / state_shard, 0.0)
    own = np.where(columns.shares_state, compute / shard + updated, nbytes / shard)
    # What is updated is a part of what computes, unless that has another dtype.
    apart = np.where(zero_stage > 0, nbytes / shard, nbytes)
    replicated = np.where(copied > 0, compute + apart, nbytes)
    stepped = of_each(owned, lambda own: own.stepped_bytes)
    if first.offload == "none":
        parameters = np.where(zero_stage == 3, own + gathered, replicated)
        return parameters, numerics.states * stepped / state_shard
    # Shards in the dtype that computes stay, but those that every gather brings.
    stay = 0.0 if first.offload == "parameters" else compute / shard
    parameters = np.where(zero_stage == 3, stay + whole, compute)
    return parameters, np.zeros_like(parameters)
