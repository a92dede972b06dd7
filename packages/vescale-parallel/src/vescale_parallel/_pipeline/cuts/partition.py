"""Where a pipeline is split: consecutive blocks to each stage."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vescale_parallel._model.blocks import numel_of
from vescale_parallel._plan.plan import ParallelPlan


def split_blocks(weights: Sequence[float], num_stages: int) -> list[int]:
    """Cut a sequence into consecutive parts so that the heaviest part is lightest.

    Args:
        weights: Cost of each block, in order.
        num_stages: Number of parts, none empty.

    Returns:
        Index of the first block of every part.

    Raises:
        ValueError: If there are fewer blocks than parts.

    Example:
        >>> split_blocks([1, 1, 1, 3], 2)
        [0, 3]
    """
    if num_stages > len(weights):
        raise ValueError(
            f"expected at most as many pipeline stages as blocks ({len(weights)}), "
            f"got {num_stages}"
        )
    totals = [0.0]
    for weight in weights:
        totals.append(totals[-1] + weight)
    # best[k][i]: lightest heaviest part when the first i blocks make k parts, and its cut.
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * len(weights)]
    for parts in range(1, num_stages + 1):
        row: list[tuple[float, int]] = [(float("inf"), 0)] * (len(weights) + 1)
        for end in range(parts, len(weights) + 1):
            row[end] = min(
                (max(best[parts - 1][cut][0], totals[end] - totals[cut]), cut)
                for cut in range(parts - 1, end)
            )
        best.append(row)
    starts: list[int] = []
    end = len(weights)
    for parts in range(num_stages, 0, -1):
        end = best[parts][end][1]
        starts.insert(0, end)
    return starts


def stage_starts(plan: ParallelPlan, model: nn.Module, blocks: Sequence[str]) -> list[int]:
    """Return the index of the first block of every stage.

    Raises:
        ValueError: If split points name no block, are out of order, or are too few or many,
            or there are more stages than blocks.
    """
    pipeline = plan.pipeline_parallel
    if pipeline.num_stages > len(blocks):
        raise ValueError(
            f"expected at most {len(blocks)} pipeline stages, one per block of "
            f"{type(model).__name__}, got {pipeline.num_stages} (pipeline_parallel.size "
            f"{pipeline.size} x virtual_stages {pipeline.virtual_stages})"
        )
    if not pipeline.split_points:
        uniform = pipeline.split_method != "parameters"
        weights = [1.0 if uniform else float(numel_of(model.get_submodule(fqn))) for fqn in blocks]
        return split_blocks(weights, pipeline.num_stages)
    if len(pipeline.split_points) != pipeline.num_stages - 1:
        raise ValueError(
            f"expected {pipeline.num_stages - 1} pipeline_parallel.split_points for "
            f"{pipeline.num_stages} stages, got {len(pipeline.split_points)}"
        )
    unknown = [point for point in pipeline.split_points if point not in blocks]
    if unknown:
        raise ValueError(
            f"pipeline_parallel.split_points: {unknown[0]!r} is no block of "
            f"{type(model).__name__}; blocks are {blocks[0]!r} to {blocks[-1]!r}"
        )
    starts = [0, *(list(blocks).index(point) for point in pipeline.split_points)]
    if starts != sorted(set(starts)):
        raise ValueError(
            f"expected pipeline_parallel.split_points in the order of the blocks, none the "
            f"first block, got {pipeline.split_points}"
        )
    return starts
