"""Where constraints leave nothing, the plan says which of them, and what would have to give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_planner import Cluster, generate_plan

CPU = Cluster.preset("cpu")


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def refusal(constraints: dict[str, Any], world_size: int = 4, cluster: Cluster = CPU) -> str:
    with pytest.raises(ValueError, match=r"expected|no plan obeys") as caught:
        generate_plan(
            Net(), constraints, world_size=world_size, cluster=cluster,
            example_batch=torch.ones(8, 64),
        )  # fmt: skip
    return str(caught.value)


def test_the_smallest_set_is_named_and_what_comes_without_each() -> None:
    text = refusal(
        {
            "pipeline_parallel.size": 2,
            "pipeline_parallel.microbatches": 3,
            "batch.global_size": 8,
            "recompute": "none",
        }
    )
    # Eight rows are not three micro-batches, whatever else is asked for.
    assert "pipeline_parallel.microbatches 3 leaves no plan that fits" in text
    assert "without pipeline_parallel.microbatches: " in text
    assert "'none'" not in text


def test_memory_and_what_would_save_it_exclude_each_other() -> None:
    asked = {"data_parallel.size": 4, "data_parallel.zero_stage": 0}
    one = generate_plan(
        Net(),
        {
            "data_parallel.size": 4,
            "data_parallel.zero_stage": 3,
            "data_parallel.reshard_after_forward": True,
        },
        world_size=4,
        cluster=CPU,
        example_batch=torch.ones(8, 64),
    )
    assert one.estimate is not None
    tight = replace(CPU, memory_bytes=one.estimate.memory_bytes + 1000)
    text = refusal(asked, cluster=tight)
    assert "data_parallel.size 4 and data_parallel.zero_stage 0 exclude each other" in text
    assert "without data_parallel.zero_stage: data parallel 4, ZeRO 3" in text


class LeavingOut(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        return x.square().mean()


def test_what_the_runtime_refuses_is_no_conflict_of_constraints() -> None:
    asked = {"pipeline_parallel.size": 2, "tensor_parallel.size": 1}
    with pytest.raises(ValueError, match="called once each and in order") as caught:
        generate_plan(
            LeavingOut(), asked, world_size=2, cluster=CPU, example_batch=torch.ones(8, 64)
        )
    assert "exclude" not in str(caught.value)


def test_a_model_that_fits_nowhere_is_no_conflict_of_constraints() -> None:
    text = refusal(
        {"data_parallel.size": 4}, cluster=replace(CPU, memory_bytes=500 * 10**6 + 1000)
    )
    assert "exclude" not in text
    assert "leaves no plan" not in text
