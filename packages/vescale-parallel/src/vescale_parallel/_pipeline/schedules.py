"""The order in which a rank of a pipeline runs its stages, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: ``"F"`` forward, ``"B"`` backward.
        stage: Index of the stage over the whole pipeline.
        microbatch: Index of the micro-batch.
    """

    kind: Literal["F", "B"]
    stage: int
    microbatch: int


def actions_of(
    schedule: str, rank: int, *, size: int, virtual_stages: int, microbatches: int
) -> tuple[Action, ...]:
    """Return what one pipeline rank does in one step, in order.

    Stage ``s`` lives on rank ``s % size``. ``gpipe`` is Huang et al. 2019, ``1f1b`` the
    flush schedule of PipeDream (Narayanan et al. 2021a), ``interleaved_1f1b`` that of
    Megatron-LM (Narayanan et al. 2021b).

    Args:
        schedule: One of the three names.
        rank: Index along the pipeline axis.
        size: Ranks along the pipeline axis.
        virtual_stages: Stages per rank.
        microbatches: Micro-batches of the step.

    Example:
        >>> [f"{a.kind}{a.microbatch}" for a in actions_of(
        ...     "1f1b", 0, size=2, virtual_stages=1, microbatches=3)]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    # A schedule is three runs: `warmup` forwards, pairs of one forward and one backward, and the
    # backwards that are left. The orders of forwards and of backwards are the same in all of them.
    total = microbatches * virtual_stages
    forwards = [_forward(k, rank, size, virtual_stages) for k in range(total)]
    backwards = [_backward(k, rank, size, virtual_stages) for k in range(total)]
    if schedule == "gpipe":
        warmup = total
    elif virtual_stages == 1:
        # One for each rank behind this one: only then has the last one the first micro-batch.
        warmup = min(total, size - rank - 1)
    else:
        # All chunks but the last run their first `size` micro-batches; then come as many more
        # as there are hops from here to the last rank and, for the first backward, back.
        warmup = min(total, (size - rank - 1) * 2 + (virtual_stages - 1) * size)
    steady = [each for pair in zip(forwards[warmup:], backwards, strict=False) for each in pair]
    return (*forwards[:warmup], *steady, *backwards[total - warmup :])


def forward_actions(
    rank: int, *, size: int, virtual_stages: int, microbatches: int
) -> tuple[Action, ...]:
    """Return the forward passes alone, for evaluation: of any number of micro-batches.

    The order is that of training, groups of ``size`` per chunk; the last group may be smaller.
    """
    return tuple(
        Action("F", chunk * size + rank, microbatch)
        for first in range(0, microbatches, size)
        for chunk in range(virtual_stages)
        for microbatch in range(first, min(first + size, microbatches))
    )


def _forward(k: int, rank: int, size: int, virtual_stages: int) -> Action:
    chunk, microbatch = _position(k, size, virtual_stages)
    return Action("F", chunk * size + rank, microbatch)


def _backward(k: int, rank: int, size: int, virtual_stages: int) -> Action:
    chunk, microbatch = _position(k, size, virtual_stages)
    return Action("B", (virtual_stages - 1 - chunk) * size + rank, microbatch)


def _position(k: int, size: int, virtual_stages: int) -> tuple[int, int]:
    """Return (chunk, micro-batch) of a rank's k-th pass: groups of ``size`` per chunk.

    After ``size`` micro-batches of one chunk the first one has gone round all ranks and is back
    for the next chunk, so no rank waits; hence micro-batches must be a multiple of ``size``.
    """
    if virtual_stages == 1:
        return 0, k
    group, within = divmod(k, size * virtual_stages)
    chunk, offset = divmod(within, size)
    return chunk, group * size + offset
