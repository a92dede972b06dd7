"""Experts on several ranks: the loss, gradients and parameters of one device."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from vescale_testing import World

from .experts import FAMILIES, Trained, train
from .plans import DP, EP, PARTS, PP, ZERO, Constraints

# Of sums in float64 that are added in another order; the contract of this repository is 1e-12.
RELATIVE = 1e-12


@cache
def on_one_device(
    family: str, implementation: str, parts: int, more: tuple[tuple[str, Any], ...]
) -> Trained:
    return train(family, implementation, None, parts, more=dict(more))


def check(
    world: World,
    plan: Constraints,
    family: str,
    implementation: str = "eager",
    parts: int = 0,
    **more: Any,
) -> None:
    """Train under a plan and compare every rank with one device that accumulates."""
    parts = parts or plan[DP]
    expected = on_one_device(family, implementation, parts, tuple(more.items()))
    compare(world.run(train, family, implementation, plan, parts, 3, more), expected)


def compare(trained: list[Trained], expected: Trained) -> None:
    """Compare what every rank has with one device."""
    for made in trained:
        assert made.losses == pytest.approx(expected.losses, rel=RELATIVE, abs=0)
        assert made.norms == pytest.approx(expected.norms, rel=RELATIVE, abs=0)
        assert [*made.grads] == [*expected.grads]
        for name, grad in expected.grads.items():
            scale = float(grad.abs().max())
            torch.testing.assert_close(
                # Where the true gradient is zero, as that of the bias of keys, rounding is left.
                made.grads[name],
                grad,
                rtol=0,
                atol=RELATIVE * (scale + 1e-3),
                msg=name,
            )
        for name, parameter in expected.parameters.items():
            torch.testing.assert_close(
                # AdamW's first steps divide by gradients that may be nothing but rounding.
                made.parameters[name],
                parameter,
                rtol=0,
                atol=1e-10,
                msg=name,
            )


OTHERS = [family for family in FAMILIES if family != "mixtral"]


@pytest.mark.by_day("grouped_mm")
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_two_ranks_share_the_experts_of_mixtral(world2: World, implementation: str) -> None:
    check(world2, {DP: 2, EP: 2}, "mixtral", implementation)


@pytest.mark.by_day("grouped_mm-glm4_moe")
@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_two_ranks_share_the_experts_of_a_family(
    world2: World, family: str, implementation: str
) -> None:
    check(world2, {DP: 2, EP: 2}, family, implementation)


@pytest.mark.by_day("qwen3_moe-eager")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        ("qwen3_moe", "eager"),
        ("qwen3_moe", "grouped_mm"),
        ("gpt_oss", "eager"),
        ("gpt_oss", "grouped_mm"),
    ],
)
def test_experts_and_ranks_without_a_token_have_gradients_of_zero(
    world2: World, family: str, implementation: str
) -> None:
    check(world2, {DP: 2, EP: 2}, family, implementation, skewed=True)


@pytest.mark.by_day("4-1")
@pytest.mark.slow
@pytest.mark.parametrize(("size", "zero"), [*itertools.product([2, 4], [0, 1, 2, 3])])
def test_four_ranks_share_experts_under_every_stage(world4: World, size: int, zero: int) -> None:
    check(world4, {DP: 4, EP: size, ZERO: zero}, "qwen2_moe", skewed=True)


@pytest.mark.by_day("2")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_two_ranks_share_experts_under_every_stage(world2: World, zero: int) -> None:
    check(world2, {DP: 2, EP: 2, ZERO: zero}, "gpt_oss", "grouped_mm", skewed=True)


@pytest.mark.by_day("mixtral")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_balancing_losses_are_those_of_the_global_batch(world2: World, family: str) -> None:
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    # All of the batch at once: such a loss is not a mean over micro-batches.
    whole = on_one_device(family, "eager", 1, tuple(balanced.items()))
    compare(world2.run(train, family, "eager", {DP: 2, EP: 2}, 2, 3, balanced), whole)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_stages_of_a_pipeline_have_experts_that_ranks_share(world4: World, family: str) -> None:
    plan = {DP: 2, EP: 2, PP: 2, PARTS: 2}
    check(world4, plan, family, "batched_mm", parts=4)


@pytest.mark.nightly
@pytest.mark.slow
def test_accumulation_in_the_loop_and_inside_of_calls_is_one_devices(world2: World) -> None:
    check(world2, {DP: 2, EP: 2}, "olmoe", parts=4)
    inside = {DP: 2, EP: 2, ZERO: 2, "batch.gradient_accumulation": 2}
    check(world2, inside, "olmoe", "batched_mm", parts=2)
