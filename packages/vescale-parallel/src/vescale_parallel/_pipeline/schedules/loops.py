"""Schedules whose stages go round the ranks."""

from __future__ import annotations

from vescale_parallel._plan.pipeline_schedules import StagePlacement

from .action import Action, Kind


def one_forward_one_backward(
    rank: int, placement: StagePlacement, microbatches: int, *, everything_first: bool
) -> tuple[Action, ...]:
    """Return ``1f1b``, ``interleaved_1f1b``, or with everything first ``gpipe``."""
    # A schedule is three runs: `warmup` forwards, pairs of one forward and one backward, and the
    # backwards that are left. The orders of forwards and of backwards are the same in all of them.
    size, virtual_stages = placement.size, placement.virtual_stages
    total = microbatches * virtual_stages
    forwards = [_forward(k, rank, placement) for k in range(total)]
    backwards = [_backward(k, rank, placement, "B") for k in range(total)]
    if everything_first:
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


def breadth_first(rank: int, placement: StagePlacement, microbatches: int) -> tuple[Action, ...]:
    """Return ``looped_bfs``: every stage runs all micro-batches before the rank's next one."""
    stages = placement.stages_of(rank)
    forwards = [Action("F", stage, k) for stage in stages for k in range(microbatches)]
    backwards = [Action("B", stage, k) for stage in reversed(stages) for k in range(microbatches)]
    return (*forwards, *backwards)


def zero_bubble(rank: int, placement: StagePlacement, microbatches: int) -> tuple[Action, ...]:
    """Return ``interleaved_zero_bubble``: weight gradients wait until a rank would idle."""
    size, virtual_stages = placement.size, placement.virtual_stages
    total = microbatches * virtual_stages
    forwards = [_forward(k, rank, placement) for k in range(total)]
    inputs = [_backward(k, rank, placement, "I") for k in range(total)]
    weights = [_backward(k, rank, placement, "W") for k in range(total)]
    # A hop on the way back takes an input gradient only, so one forward less than 1F1B fills it.
    warmup = min(total, (size - rank - 1) + (virtual_stages - 1) * size)
    actions = forwards[:warmup]
    for k in range(total):
        actions += [*forwards[warmup + k : warmup + k + 1], inputs[k]]
        # Rank r lets r of them wait: so many hops before the first rank it is done.
        if k >= rank:
            actions.append(weights[k - rank])
    return (*actions, *weights[max(0, total - rank) :])


def _forward(k: int, rank: int, placement: StagePlacement) -> Action:
    chunk, microbatch = _position(k, placement)
    return Action("F", chunk * placement.size + rank, microbatch)


def _backward(k: int, rank: int, placement: StagePlacement, kind: Kind) -> Action:
    chunk, microbatch = _position(k, placement)
    stage = (placement.virtual_stages - 1 - chunk) * placement.size + rank
    return Action(kind, stage, microbatch)


def _position(k: int, placement: StagePlacement) -> tuple[int, int]:
    """Return (chunk, micro-batch) of a rank's k-th pass: groups of ``size`` per chunk.

    After ``size`` micro-batches of one chunk the first one has gone round all ranks and is back
    for the next chunk, so no rank waits; hence micro-batches must be a multiple of ``size``.
    """
    size, virtual_stages = placement.size, placement.virtual_stages
    if virtual_stages == 1:
        return 0, k
    group, within = divmod(k, size * virtual_stages)
    chunk, offset = divmod(within, size)
    return chunk, group * size + offset
