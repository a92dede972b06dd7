"""Gradients that the backend sums in its own order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_parallel import ParallelPlan, with_constraints

from .test_zero_orders import _two_forwards_first, check
from .zero_model import (
    ROWS,
    WIDTH,
    WORLD,
    OwnCounter,
    assert_close,
    net,
    parallel,
    rows_of,
    wholes,
)

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
LIBRARY = {"data_parallel.reduction": "library"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_those_in_rank_order_up_to_rounding(
    in_threads: InThreads, stage: int
) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    expected(ROWS).backward()

    def steps(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage, **LIBRARY)
        for _ in range(2):
            model.zero_grad()
            model(rows_of(rank)).backward()
        return wholes(model)

    first, *others = in_threads(WORLD, steps)
    assert_close(first, expected)
    for other in others:  # one sum, which all ranks have
        for name, grad in first.items():
            same = other[name]
            assert grad is not None
            assert same is not None
            assert torch.equal(grad, same)


def test_copies_of_shards_are_summed_too(in_threads: InThreads) -> None:
    constraints = {
        "data_parallel.size": 4,
        "data_parallel.replicate_size": 2,
        "data_parallel.zero_stage": 3,
        **LIBRARY,
    }
    check(in_threads, _two_forwards_first, constraints)


def _aligned(numel: int, multiple: int = 16) -> int:
    return -(-numel // multiple) * multiple


@pytest.mark.parametrize("stage", [0, 2])
def test_a_group_is_one_collective_of_the_bytes_of_a_ring(
    in_threads: InThreads, stage: int
) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> list[tuple[str, int]]:
        model = parallel(models[rank], stage, **LIBRARY)
        model(rows_of(rank)).backward()
        with OwnCounter() as counter:
            model(rows_of(rank)).backward()
        sums = ("all_reduce", "reduce_scatter", "all_to_all")
        return [(event.kind, event.nbytes) for event in counter.events if event.kind in sums]

    root, block = WIDTH * WIDTH, WIDTH * WIDTH + WIDTH
    if stage == 0:  # a rank sends a half twice
        expected = [("all_reduce", 8 * _aligned(numel)) for numel in (block, block, root)]
    else:  # a half, to one other rank
        halves = [-(-numel // WORLD) for numel in (block, block, root)]
        expected = [("reduce_scatter", 8 * _aligned(half)) for half in halves]
    for found in in_threads(WORLD, step):
        assert found == expected


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_run_other_blocks_are_told(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> None:
        model = parallel(models[rank], stage, **LIBRARY)
        model(rows_of(rank)).backward()
        if rank == 1:
            blocks = model.blocks._modules
            blocks["0"], blocks["1"] = blocks["1"], blocks["0"]
        with pytest.raises(ValueError, match="different blocks of the model at the same time"):
            model(rows_of(rank)).backward()

    in_threads(WORLD, step)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("reduction", "nccl", r"reduction to be one of \['ordered', 'library'\], got 'nccl'"),
        ("prefetch", -1, "data_parallel.prefetch to be a number of blocks, 0 for none, got -1"),
        ("prefetch", True, "data_parallel.prefetch to be a number of blocks, 0 for none"),
        ("prefetch", 0.0, "data_parallel.prefetch to be a number of blocks, 0 for none"),
    ],
)
def test_other_values_are_refused(key: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        with_constraints(ParallelPlan(), {f"data_parallel.{key}": value})


@pytest.mark.parametrize(
    ("ranks", "kinds"), [(2, {"all_reduce"}), (3, {"all_to_all", "all_gather"})]
)
def test_copies_of_two_ranks_are_summed_by_the_backend(
    in_threads: InThreads, ranks: int, kinds: set[str]
) -> None:
    # a + b is b + a: nobody needs to hold what another rank has sent.
    models = [net() for _ in range(ranks)]

    def step(rank: int) -> set[str]:
        model = parallel(models[rank], 0, **{"data_parallel.size": ranks})
        rows = ROWS[rank : rank + 1]
        model(rows).backward()
        with OwnCounter() as counter:
            model(rows).backward()
        return {event.kind for event in counter.events if event.nbytes > 64 * ranks}

    for found in in_threads(ranks, step):
        assert found == kinds
