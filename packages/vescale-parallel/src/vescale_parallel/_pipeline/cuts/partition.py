"""Where a pipeline is split: consecutive blocks to each stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import nn

from vescale_parallel._plan.plan import ParallelPlan

# Weight of the heaviest stage, sum of squares of weights, sum of squares of numbers of blocks,
# and where the last stage begins.
_Split = tuple[float, float, float, int]


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
    return lightest_split([weights] * num_stages, [0.0] * num_stages)


def lightest_split(weights: Sequence[Sequence[float]], extra: Sequence[float]) -> list[int]:
    """Cut blocks into consecutive stages so that the heaviest stage is lightest.

    Of such splits it is one whose stages are otherwise even: the sum of the squares of their
    weights is least, then that of their numbers of blocks, as far as the first stages tell.

    Args:
        weights: For every stage, what each block weighs if it is there; none is negative.
        extra: For every stage, what it weighs without any block.

    Returns:
        Index of the first block of every stage; none is empty.

    Raises:
        ValueError: If there are fewer blocks than stages.
    """
    num_blocks, num_stages = len(weights[0]), len(weights)
    if num_stages > num_blocks:
        raise ValueError(
            f"expected at most as many pipeline stages as blocks ({num_blocks}), got {num_stages}"
        )
    nowhere: _Split = (math.inf, math.inf, math.inf, 0)
    # best[k][i]: the best split of the first i blocks into k stages, and where the last begins.
    best: list[list[_Split]] = [[(0.0, 0.0, 0.0, 0), *[nowhere] * num_blocks]]
    for stage, (row, more) in enumerate(zip(weights, extra, strict=True)):
        totals = [*itertools.accumulate(row, initial=0.0)]
        found: list[_Split] = [nowhere] * (num_blocks + 1)
        # Every stage behind has a block, too.
        for end in range(stage + 1, num_blocks - num_stages + stage + 2):
            for cut in range(end - 1, stage - 1, -1):
                weight, count = totals[end] - totals[cut] + more, end - cut
                if weight > found[end][0]:
                    break  # the earlier it is cut, the heavier it is
                heaviest, squares, counts, _ = best[stage][cut]
                choice = max(heaviest, weight), squares + weight**2, counts + count**2, cut
                found[end] = min(found[end], choice)
        best.append(found)
    starts, end = list[int](), num_blocks
    for k in range(num_stages, 0, -1):
        end = best[k][end][3]
        starts.insert(0, end)
    return starts


def stage_starts(plan: ParallelPlan, model: nn.Module, blocks: Sequence[str]) -> list[int]:
    """Return the index of the first block of every stage, from a plan's split points.

    Raises:
        ValueError: If split points name no block, are out of order, or are too few or many,
            there are more stages than blocks, or there are no split points and blocks are not
            counted alone.
    """
    pipeline = plan.pipeline_parallel
    if pipeline.num_stages > len(blocks):
        raise ValueError(
            f"expected at most {len(blocks)} pipeline stages, one per block of "
            f"{type(model).__name__}, got {pipeline.num_stages} (pipeline_parallel.size "
            f"{pipeline.size} x virtual_stages {pipeline.virtual_stages})"
        )
    if not pipeline.split_points:
        if pipeline.split_method != "uniform":
            raise ValueError(
                f"pipeline_parallel.split_method {pipeline.split_method!r} needs "
                f"{pipeline.num_stages - 1} pipeline_parallel.split_points, the first block of "
                "every stage but the first, got none"
            )
        return split_blocks([1.0] * len(blocks), pipeline.num_stages)
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
