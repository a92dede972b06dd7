"""Where a pipeline is split into stages."""

from __future__ import annotations

from vescale_parallel import PartCost, StageRule, balanced_starts
from vescale_planner._parts import Part
from vescale_planner._workload import Workload


def stage_starts(workload: Workload, rule: StageRule, rows: float, ep: int = 1) -> list[int]:
    """Return the first block of every stage, as :func:`balanced_starts` cuts.

    Args:
        workload: The model.
        rule: What is to be even, over at most as many stages as blocks.
        rows: Of a micro-batch.
        ep: Ranks that share experts, whose bytes count on one of them.
    """
    tied = sum(each.numel for each in workload.tied), sum(each.nbytes for each in workload.tied)
    after = _cost(workload.after, rows, ep) + PartCost(numel=tied[0], nbytes=tied[1])
    blocks = [_cost(part, rows, ep) for part in workload.blocks]
    return balanced_starts(_cost(workload.before, rows, ep), blocks, after, rule)


def _cost(part: Part, rows: float, ep: int) -> PartCost:
    elsewhere = 0
    if ep > 1:
        elsewhere = round(sum(each.nbytes * each.elsewhere(ep) for each in part.parameters))
    return PartCost(
        numel=part.numel,
        nbytes=part.nbytes - elsewhere,
        flops=part.flops * rows,
        saved_bytes=part.saved_bytes * rows,
        output_bytes=part.output_bytes * rows,
    )
