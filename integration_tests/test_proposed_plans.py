"""What the planner proposes is what parallelize accepts, and it runs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from vescale_parallel import ParallelPlan, parallelize
from vescale_planner import Cluster, generate_plan
from vescale_testing import World

from .odd_models import MODELS

CPU = Cluster.preset("cpu")


def _pipeline(world_size: int) -> dict[str, Any]:
    return {"pipeline_parallel.size": world_size}


def _no_data(world_size: int) -> dict[str, Any]:
    return {"data_parallel.size": 1}


def _tensor(world_size: int) -> dict[str, Any]:
    return {"tensor_parallel.size": world_size}


def on_rank_trains(name: str, plan_json: str) -> float:
    """Run one step of a plan; return the loss."""
    make, make_batch = MODELS[name]
    torch.manual_seed(0)
    model = make()
    parallelized: Any = parallelize(ParallelPlan.from_json(plan_json), model)
    loss = parallelized(make_batch())
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach())


def _plans(name: str, world_size: int) -> dict[str, ParallelPlan]:
    """Return what is proposed as it is, and with each kind of parallelism asked for."""
    make, make_batch = MODELS[name]
    torch.manual_seed(0)

    def plan_for(constraints: dict[str, Any], batch: Any) -> ParallelPlan:
        return generate_plan(
            make(), constraints, world_size=world_size, cluster=CPU, example_batch=batch
        )

    # Without a wish there is always data parallelism.
    plans = [plan_for({}, make_batch()), plan_for({}, None)]
    for wish in (_pipeline, _no_data, _tensor) if world_size > 1 else ():
        with contextlib.suppress(ValueError):
            plans.append(plan_for(wish(world_size), make_batch()))
    return {plan.to_json(): plan for plan in plans}


def _assert_runs(name: str, world: World, world_size: int) -> None:
    make, make_batch = MODELS[name]
    torch.manual_seed(0)
    model: Any = make()
    expected = float(model(make_batch()).detach())
    for plan in _plans(name, world_size).values():
        losses = world.run(on_rank_trains, name, plan.to_json())
        # Float32, added up in another order: the bound of this repository for it.
        assert losses == pytest.approx([expected] * world_size, rel=1e-5), plan


@pytest.mark.parametrize("name", MODELS)
def test_plans_for_one_rank_run(name: str, world1: World) -> None:
    _assert_runs(name, world1, 1)


@pytest.mark.by_day("encoder and decoder", "no blocks", "convolutions", "only buffers")
@pytest.mark.parametrize("name", MODELS)
def test_plans_for_two_ranks_run(name: str, world2: World) -> None:
    _assert_runs(name, world2, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_plans_for_four_ranks_run(name: str, world4: World) -> None:
    _assert_runs(name, world4, 4)
