"""Recomputation of as few blocks as make a plan fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import ParallelPlan, with_constraints
from vescale_planner import Cluster, generate_plan, predict

WIDTH, BLOCKS, RECOMPUTE = 2048, 8, "recompute"
CLUSTER = replace(Cluster.preset("h100"), reserved_bytes=0)
BATCH = {"x": torch.zeros(4, 512, WIDTH, device="meta")}
TP, PP, DP = "tensor_parallel.size", "pipeline_parallel.size", "data_parallel.size"
GIVEN: dict[str, Any] = {"batch.global_size": 8, TP: 1, "batch.gradient_accumulation": 1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(BLOCKS)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, torch.ones_like(x))


def net() -> Net:
    with torch.device("meta"):
        return Net()


def memory_of(again: int, given: dict[str, Any]) -> int:
    """Return what a plan of two ranks needs of which the first blocks of each stage run again."""
    size = BLOCKS // given.get(PP, 1)
    names = {
        f"blocks.{start + i}": "full" for start in range(0, BLOCKS, size) for i in range(again)
    }
    said = {**given, DP: 2 // given.get(PP, 1), RECOMPUTE: names or "none"}
    plan = with_constraints(ParallelPlan(), said)
    return predict(net(), plan, CLUSTER, example_batch=BATCH).memory_bytes


def chosen(memory_bytes: int, given: dict[str, Any]) -> ParallelPlan:
    cluster = replace(CLUSTER, memory_bytes=memory_bytes)
    return generate_plan(net(), given, world_size=2, cluster=cluster, example_batch=BATCH)


FLAT = {**GIVEN, PP: 1, "data_parallel.zero_stage": 0}
PIPELINED = {**GIVEN, PP: 2, "pipeline_parallel.microbatches": 2, DP: 1}
PIPELINED["pipeline_parallel.schedule"] = "gpipe"


@pytest.mark.parametrize("given", [FLAT, PIPELINED], ids=["flat", "pipelined"])
def test_memory_falls_and_time_rises_with_each_block(given: dict[str, Any]) -> None:
    size = BLOCKS // given[PP]
    needed = [memory_of(again, given) for again in range(size + 1)]
    assert needed == sorted(needed, reverse=True)
    assert len({*needed[1:]}) == size
    # Full recomputation is that of all blocks.
    said = {**given, DP: 2 // given[PP], RECOMPUTE: "full"}
    full = with_constraints(ParallelPlan(), said)
    assert predict(net(), full, CLUSTER, example_batch=BATCH).memory_bytes == needed[-1]


@pytest.mark.parametrize("again", range(1, BLOCKS))
def test_as_few_blocks_as_fit_are_chosen(again: int) -> None:
    needed = memory_of(again, FLAT)
    plan = chosen(needed, FLAT)
    assert plan.recompute == {f"blocks.{index}": "full" for index in range(again)}
    assert plan.estimate is not None
    assert plan.estimate.memory_bytes == needed
    assert "% of blocks recomputed" in plan.reasons[0]
    # A plan that was generated is predicted as it was.
    found = predict(net(), plan, CLUSTER, example_batch=BATCH)
    assert found.step_seconds == pytest.approx(plan.estimate.step_seconds)
    assert found.memory_bytes == needed


def test_each_stage_has_its_own() -> None:
    plan = chosen(memory_of(1, PIPELINED), PIPELINED)
    assert plan.recompute == {"blocks.0": "full", "blocks.4": "full"}


def test_none_or_all_where_that_is_as_good_or_asked_for() -> None:
    assert chosen(memory_of(0, FLAT), FLAT).recompute == "none"
    assert chosen(memory_of(BLOCKS, FLAT), FLAT).recompute == "full"
    assert chosen(memory_of(2, FLAT), {**FLAT, RECOMPUTE: "full"}).recompute == "full"
    with pytest.raises(ValueError, match=r"without recompute: .*activations of 25% of blocks"):
        chosen(memory_of(2, FLAT), {**FLAT, RECOMPUTE: "none"})
