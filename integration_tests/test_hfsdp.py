"""Copies of sharded parameters that share out their optimizer state (HFSDP)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import ParallelPlan, with_constraints
from vescale_testing import World

from .beside_one_device import ROWS, adamw, batch_of, build, loss_of, train_beside
from .training import Recipe, train, whole

pytestmark = pytest.mark.slow

HFSDP: dict[str, Any] = {
    "data_parallel.size": 4,
    "data_parallel.zero_stage": 3,
    "data_parallel.replicate_size": 2,
    "data_parallel.replicate_zero_stage": 1,
}


def _freeze(model: nn.Module) -> None:
    for index, (_, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(index % 3 != 1)


def _train(name: str) -> None:
    train_beside(name, HFSDP)


@pytest.mark.by_day("conv")
@pytest.mark.parametrize("name", ["llama", "gpt2", "conv", "bert", "mixtral"])
def test_parameters_are_those_of_one_device(world4: World, name: str) -> None:
    world4.run(_train, name)


def _train_otherwise() -> None:
    train_beside("gpt2", HFSDP, passes=2, evaluates=True, change=_freeze, steps=3)
    train_beside(
        "llama",
        {**HFSDP, "data_parallel.reshard_after_forward": False, "data_parallel.prefetch": 0},
        steps=2,
    )


@pytest.mark.nightly
def test_a_loop_that_accumulates_freezes_and_evaluates_has_one_device_s_parameters(
    world4: World,
) -> None:
    world4.run(_train_otherwise)


def _trained(name: str, constraints: dict[str, Any], steps: int) -> list[Tensor]:
    plan = with_constraints(ParallelPlan(), constraints)
    model, optimizer = vescale.parallelize(plan, build(name), adamw)
    ranks, rank = plan.data_parallel.size, vescale.data_parallel_rank(model)
    for step in range(steps):
        inputs, targets = batch_of(name, step, ROWS * ranks)
        loss_of(model, inputs.chunk(ranks)[rank], targets.chunk(ranks)[rank]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter) for parameter in model.parameters()]


def _train_as_with_own_state(name: str, changes: dict[str, Any], steps: int) -> None:
    plan = {**HFSDP, **changes}
    found = _trained(name, plan, steps)
    expected = _trained(name, {**plan, "data_parallel.replicate_zero_stage": 0}, steps)
    assert all(map(torch.equal, found, expected))


HALF = {"precision.param": "bfloat16"}


@pytest.mark.by_day("*'precision.reduce': 'float32'*")
@pytest.mark.parametrize("changes", [HALF, {**HALF, "precision.reduce": "float32"}], ids=str)
def test_half_precision_and_clipping_have_the_bits_of_copies_with_their_own_state(
    world4: World, changes: dict[str, Any]
) -> None:
    world4.run(_train_as_with_own_state, "conv", changes, 3)


OTHER_AXES = {
    "tp": {"tensor_parallel.size": 2},
    "tp-sequence": {"tensor_parallel.size": 2, "tensor_parallel.sequence": True},
    "pp": {"pipeline_parallel.size": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("axes", OTHER_AXES)
def test_eight_ranks_with_other_axes_have_one_device_s_parameters(axes: str, model: str) -> None:
    recipe = Recipe(model=model, steps=4)
    expected = train(recipe)
    [found, *_] = vescale.emulate(train, 8, args=(recipe, {**HFSDP, **OTHER_AXES[axes]}), rank=0)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12, abs=0)
    for name, parameter in expected.parameters.items():
        # AdamW's first steps divide by gradients that may be nothing but rounding.
        torch.testing.assert_close(found.parameters[name], parameter, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel.zero_stage": 1}, "expected data_parallel.zero_stage 3, got 1"),
        ({"data_parallel.replicate_size": 1}, "expected data_parallel.replicate_size above 1"),
        (
            {"data_parallel.replicate_size": 4},
            r"replicate_size below data_parallel.size \(4\), got 4",
        ),
        (
            {"expert_parallel.size": 2},
            "replicate_zero_stage 0 with expert_parallel.size 2, got 1",
        ),
        ({"data_parallel.offload": "optimizer"}, "data_parallel.offload 'none', got 'optimizer'"),
        ({"data_parallel.replicate_zero_stage": 2}, r"replicate_zero_stage to be one of \[0, 1\]"),
    ],
)
def test_plans_that_say_something_else_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_constraints(ParallelPlan(), {**HFSDP, **changes})
