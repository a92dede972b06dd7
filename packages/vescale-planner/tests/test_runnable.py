"""Only what the runtime carries out is proposed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import ParallelPlan, check_supported
from vescale_planner import Cluster, generate_plan, generate_plans

CPU = Cluster.preset("cpu")
# Neither tensor nor data parallelism: pipelines are all that is left.
ONLY_PIPELINES = {"tensor_parallel.size": 1, "data_parallel.size": 1}


class Blocks(nn.Module):
    def __init__(self, *, residual: bool = False, loss: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.residual, self.loss = residual, loss

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return x.square().mean() if self.loss else x


class Repeated(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return x.square().mean()


class LeavingOut(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        return x.square().mean()


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [("up", nn.Linear(8, 16)), ("act", nn.ReLU()), ("down", nn.Linear(16, 8))]
        self.body = nn.Sequential(OrderedDict[str, nn.Module](layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


@pytest.mark.parametrize("asked", [{}, {"pipeline_parallel.size": 2}])
def test_pipelines_that_would_not_run_are_refused_with_the_reason(asked: dict[str, int]) -> None:
    reason = r"called once each and in order, but 'layers.1' was call number 0"
    with pytest.raises(ValueError, match=reason):
        generate_plan(
            LeavingOut(),
            {**ONLY_PIPELINES, **asked},
            world_size=2,
            cluster=CPU,
            example_batch=torch.ones(4, 8),
        )


def test_a_loss_that_the_loop_computes_is_planned_as_it_runs() -> None:
    batch = torch.ones(4, 8)
    asked = {**ONLY_PIPELINES, "pipeline_parallel.size": 2}
    schedules = [
        generate_plan(
            Blocks(loss=loss), asked, world_size=2, cluster=CPU, example_batch=batch
        ).pipeline_parallel.schedule
        for loss in (False, True)
    ]
    assert schedules == ["gpipe", "1f1b"]


@pytest.mark.parametrize("model", [Blocks(), Activated(), Blocks(residual=True), Repeated()])
def test_pipelines_that_run_are_proposed(model: nn.Module) -> None:
    plan = generate_plan(
        model, ONLY_PIPELINES, world_size=2, cluster=CPU, example_batch=torch.ones(4, 8)
    )
    assert plan.pipeline_parallel.size == 2
    assert plan.pipeline_parallel.microbatches > 1


def test_pipelines_nobody_asked_for_need_a_batch_to_be_tried_on() -> None:
    with pytest.raises(ValueError, match="2 pipeline stages: needs an example_batch"):
        generate_plan(Blocks(), ONLY_PIPELINES, world_size=2, cluster=CPU)
    asked = {**ONLY_PIPELINES, "pipeline_parallel.size": 2}
    assert generate_plan(Blocks(), asked, world_size=2, cluster=CPU).pipeline_parallel.size == 2


def test_pipelines_of_one_micro_batch_are_for_those_who_ask() -> None:
    row = torch.ones(1, 8)
    with pytest.raises(ValueError, match="2 pipeline stages need 2 micro-batches or more"):
        generate_plan(Blocks(), ONLY_PIPELINES, world_size=2, cluster=CPU, example_batch=row)
    asked = {**ONLY_PIPELINES, "pipeline_parallel.size": 2}
    plan = generate_plan(Blocks(), asked, world_size=2, cluster=CPU, example_batch=row)
    assert plan.pipeline_parallel.microbatches == 1


def test_the_reasons_say_which_pipelines_would_not_run() -> None:
    plan = generate_plan(LeavingOut(), world_size=2, cluster=CPU, example_batch=torch.ones(4, 8))
    assert plan.pipeline_parallel.size == 1
    said = "\n".join(plan.reasons)
    assert "not possible: 2 pipeline stages: pipeline parallelism needs the blocks" in said
    assert "next: pipeline parallel" not in said


class Normed(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = norm(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().mean()


def test_what_the_runtime_refuses_is_not_proposed() -> None:
    batch = torch.ones(4, 8)
    with pytest.raises(ValueError, match="normalizes over the batch, which a pipeline runs in"):
        generate_plan(
            Normed(nn.BatchNorm1d), ONLY_PIPELINES, world_size=2, cluster=CPU, example_batch=batch
        )
    with pytest.raises(ValueError, match="SyncBatchNorm, which exchanges statistics"):
        generate_plan(Normed(nn.SyncBatchNorm), world_size=2, cluster=CPU)
    plan = generate_plan(Normed(nn.BatchNorm1d), world_size=2, cluster=CPU, example_batch=batch)
    check_supported(plan, Normed(nn.BatchNorm1d))
    assert plan.data_parallel.size == 2


def test_pipelines_have_as_many_micro_batches_as_ranks() -> None:
    with pytest.raises(ValueError, match="4 pipeline stages need 4 micro-batches or more"):
        generate_plan(
            Blocks(), ONLY_PIPELINES, world_size=4, cluster=CPU, example_batch=torch.ones(2, 8)
        )


def test_all_plans_are_compared_by_one_global_batch() -> None:
    plans: list[ParallelPlan] = []
    for size in (1, 2, 4):
        free = {"batch.global_size": 16, **ONLY_PIPELINES, "data_parallel.size": size}
        free["pipeline_parallel.size"] = 4 // size
        plans.append(
            generate_plan(
                Blocks(), free, world_size=4, cluster=CPU, example_batch=torch.ones(4, 8)
            )
        )
    plan = generate_plan(Blocks(), world_size=4, cluster=CPU, example_batch=torch.ones(4, 8))
    assert plan.estimate is not None
    assert plan.estimate.samples == 16
    assert all(each.estimate and each.estimate.samples == 16 for each in plans)
    assert any("a global batch of 16 rows for all plans" in reason for reason in plan.reasons)


def test_accumulation_is_chosen_before_what_costs_more() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x.square().mean()

    only = {"batch.global_size": 4096, "data_parallel.size": 2}
    batch = torch.ones(2048, 64)
    free = generate_plan(Wide(), only, world_size=2, cluster=CPU, example_batch=batch)
    assert free.batch.gradient_accumulation == 1
    assert free.estimate is not None
    tight = replace(CPU, memory_bytes=free.estimate.memory_bytes - 10**6)
    plan = generate_plan(Wide(), only, world_size=2, cluster=tight, example_batch=batch)
    assert plan.batch.gradient_accumulation > 1
    assert plan.recompute == "none"
    assert any("batch.gradient_accumulation" in reason for reason in plan.reasons)


class Contrasts(Blocks):
    """Its loss compares rows with each other, as CLIP's."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(x @ x.T, torch.arange(len(x), device=x.device))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_plan_runs_rows_in_parts_that_depend_on_each_other(device: str) -> None:
    with torch.device(device):
        model = Contrasts()
    batch = torch.ones(8, 8)
    plans = generate_plans(model, top=4, world_size=4, cluster=CPU, example_batch=batch)
    assert {plan.axes["pp"] for plan in plans} == {1}
    in_parts = {"pipeline_parallel.size": 2, "pipeline_parallel.microbatches": 2}
    for asked in (in_parts, {"batch.gradient_accumulation": 2}):
        with pytest.raises(ValueError, match="rows of the batch depend on each other"):
            generate_plan(model, asked, world_size=2, cluster=CPU, example_batch=batch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_pipeline_is_found_where_rows_are_apart(device: str) -> None:
    batch = torch.ones(8, 8, device=device)
    plans = generate_plans(
        Blocks(residual=True), top=4, world_size=2, cluster=CPU, example_batch=batch
    )
    assert 2 in {plan.axes["pp"] for plan in plans}
