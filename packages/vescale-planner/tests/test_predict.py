"""One plan, priced: the numbers of the search, for any plan."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import (
    Batch,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    ParallelPlan,
    PipelineParallel,
    TensorParallel,
)
from vescale_planner import Cluster, Prediction, generate_plan, predict

H100 = Cluster.preset("h100")
BATCH = torch.ones(8, 16, 64)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_generated_plan_reports_what_is_predicted_of_it() -> None:
    for constraints in ({}, {"data_parallel.size": 2, "pipeline_parallel.size": 2}):
        plan = generate_plan(
            Blocks(), constraints, world_size=4, cluster=H100, example_batch=BATCH
        )
        found = predict(Blocks(), plan, H100, example_batch=BATCH)
        assert plan.estimate is not None
        assert found.step_seconds == plan.estimate.step_seconds
        assert found.memory_bytes == plan.estimate.memory_bytes
        assert found.mfu == pytest.approx(plan.estimate.mfu(4))
        assert len(found.memory) == plan.pipeline_parallel.size
        assert found.breakdown.total == pytest.approx(found.step_seconds)


def test_frozen_parameters_have_no_states_and_no_gradients() -> None:
    plan = ParallelPlan()
    whole = predict(Blocks(), plan, H100, example_batch=BATCH).memory[0]
    model = Blocks()
    for layer in model.layers[:3]:
        layer.requires_grad_(requires_grad=False)
    found = predict(model, plan, H100, example_batch=BATCH).memory[0]
    assert found.parameters == whole.parameters
    assert found.optimizer == whole.optimizer / 4
    assert found.gradients == whole.gradients / 4


def test_backward_ends_at_the_first_trained_parameter() -> None:
    def products(*trained: int) -> float:
        model = Blocks()
        for index, layer in enumerate(model.layers):
            layer.requires_grad_(index in trained)
        plan = ParallelPlan(batch=Batch(global_size=2**16))  # flops, and not reading parameters
        found = predict(model, plan, H100, example_batch=BATCH)
        return found.breakdown.matrix_products

    whole = products(0, 1, 2, 3)
    # Forward of four, and gradients of inputs and of parameters: of four each.
    assert products(3) == pytest.approx((4 + 2) / 12 * whole)
    assert products(0) == pytest.approx((4 + 4 + 1) / 12 * whole)


def test_a_prediction_is_json() -> None:
    found = predict(Blocks(), ParallelPlan(), "h100", example_batch=BATCH)
    assert Prediction.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="expected a Prediction as JSON"):
        Prediction.from_json("[]")


def test_rates_are_those_of_the_batch() -> None:
    plan = ParallelPlan(data_parallel=DataParallel(size=4), batch=Batch(global_size=64))
    found = predict(Blocks(), plan, H100, example_batch=BATCH)
    tokens = 64 * 16
    assert found.tokens_per_second_per_device == tokens / (found.step_seconds * 4)
    flops = 6 * 4 * 64 * 64 * tokens
    peak = H100.flops_per_second[4]
    assert found.mfu == pytest.approx(flops / (found.step_seconds * 4 * peak))


def test_what_does_not_fit_and_what_does_not_run_yet_is_priced() -> None:
    tiny = replace(H100, memory_bytes=10**6)
    assert predict(Blocks(), ParallelPlan(), tiny, example_batch=BATCH).memory_bytes > 10**6
    context = ParallelPlan(context_parallel=ContextParallel(size=2))
    alone = predict(Blocks(), ParallelPlan(), H100, example_batch=BATCH)
    both = predict(Blocks(), context, H100, example_batch=BATCH)
    assert both.breakdown.context_parallel > 0
    assert both.breakdown.data_parallel > 0
    assert both.memory[0].activations == alone.memory[0].activations / 2
    sharded = ParallelPlan(tensor_parallel=TensorParallel(size=2))
    found = predict(Blocks(), sharded, H100, example_batch=BATCH)
    assert found.memory[0].optimizer == alone.memory[0].optimizer / 2
    assert any("has no sharding_plan" in note for note in found.assumptions)


def test_what_cannot_be_priced_is_refused() -> None:
    shared = ParallelPlan(
        data_parallel=DataParallel(size=2), expert_parallel=ExpertParallel(size=2)
    )
    with pytest.raises(ValueError, match="found no experts in Blocks"):
        predict(Blocks(), shared, H100)
    deep = ParallelPlan(pipeline_parallel=PipelineParallel(size=8, microbatches=8))
    with pytest.raises(ValueError, match="at most 4 pipeline stages, one per block, got 8"):
        predict(Blocks(), deep, H100)
    with pytest.raises(ValueError, match="splits between the blocks"):
        predict(nn.Linear(2, 2), deep, H100)


def test_assumptions_are_said() -> None:
    found = predict(Blocks(), ParallelPlan(), H100)
    assert any("no example_batch" in note for note in found.assumptions)
    assert asdict(found)["assumptions"] == found.assumptions
