"""The order in which a rank of a pipeline runs its stages, as data."""

from __future__ import annotations

from typing import Literal

from vescale_parallel._plan.pipeline_schedules import StagePlacement, rule_of

from . import loops, v_shaped
from .action import Action

# Of which kind passes are: forward, or backward as a whole.
Passes = Literal["F", "B"]


def actions_of(
    schedule: str, rank: int, *, size: int, virtual_stages: int, microbatches: int
) -> tuple[Action, ...]:
    """Return what one pipeline rank does in one step, in order.

    Stages are where :class:`StagePlacement` says. Every stage's passes of a kind are in the order
    of micro-batches, so that gradients are summed in one device's.

    - ``gpipe``: Huang et al. 2019 (arXiv 1811.06965), all forwards, then all backwards.
    - ``1f1b``: the flush schedule of PipeDream (Narayanan et al. 2021a, arXiv 2006.09503).
    - ``interleaved_1f1b``: Megatron-LM's (Narayanan et al. 2021b, arXiv 2104.04473).
    - ``looped_bfs``: breadth first (Lamy-Poirier 2022, arXiv 2211.05953), a stage's
      micro-batches one after the other. Backwards begin with the first micro-batch too.
    - ``interleaved_zero_bubble``: 1F1B whose weight gradients fill the bubble (Qi et al. 2023,
      arXiv 2401.10241, ZB-H1; here with any number of stages a rank).
    - ``zbv``: stages down the ranks and back up (the same, section 6, and arXiv 2405.15362).
    - ``dualpipev``: the half of DualPipe (DeepSeek-V3, arXiv 2412.19437) that keeps one copy of
      the weights (github.com/deepseek-ai/DualPipe).

    Args:
        schedule: One of these names.
        rank: Index along the pipeline axis.
        size: Ranks along the pipeline axis.
        virtual_stages: Stages per rank.
        microbatches: Micro-batches of the step.

    Example:
        >>> [f"{a.kind}{a.microbatch}" for a in actions_of(
        ...     "1f1b", 0, size=2, virtual_stages=1, microbatches=3)]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    placement = StagePlacement(size, virtual_stages, rule_of(schedule).style)
    match schedule:
        case "looped_bfs":
            return loops.breadth_first(rank, placement, microbatches)
        case "interleaved_zero_bubble":
            return loops.zero_bubble(rank, placement, microbatches)
        case "zbv":
            return v_shaped.zbv(rank, placement, microbatches)
        case "dualpipev":
            return v_shaped.dualpipev(rank, placement, microbatches)
        case _:
            everything_first = schedule == "gpipe"
            return loops.one_forward_one_backward(
                rank, placement, microbatches, everything_first=everything_first
            )


def passes_in_flight(
    schedule: str, *, size: int, virtual_stages: int, microbatches: int
) -> tuple[int, ...]:
    """Return for every stage how many micro-batches wait for their backward there at most.

    Example:
        >>> passes_in_flight("1f1b", size=3, virtual_stages=1, microbatches=8)
        (3, 2, 1)
    """
    shape = {"size": size, "virtual_stages": virtual_stages, "microbatches": microbatches}
    waiting, most = [0] * (size * virtual_stages), [0] * (size * virtual_stages)
    for rank in range(size):
        for action in actions_of(schedule, rank, **shape):
            # Of a backward in two parts the weights come last.
            waiting[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], waiting[action.stage])
    return tuple(most)


def order_of_passes(
    kind: Passes, rank: int, placement: StagePlacement, microbatches: int
) -> tuple[Action, ...]:
    """Return the passes of one kind alone, of any number of micro-batches.

    Forward passes alone are those of evaluation; both, one after the other, are those of a step
    whose loss the program computes from what all forward passes gave.

    Stages in a loop take groups of ``size`` micro-batches, as in training; the last group may be
    smaller. In a V the first stages of all ranks come before the second ones. Backward passes
    take a rank's stages in turn from the last one; micro-batches are in order in both.
    """
    group = placement.size if placement.style == "loop" else max(1, microbatches)
    stages = placement.stages_of(rank)
    return tuple(
        Action(kind, stage, microbatch)
        for first in range(0, microbatches, group)
        for stage in (stages if kind == "F" else reversed(stages))
        for microbatch in range(first, min(first + group, microbatches))
    )
