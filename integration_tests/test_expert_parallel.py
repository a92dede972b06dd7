"""Experts on several ranks: the loss, gradients and parameters of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from vescale_testing import World

from .experts import FAMILIES, Trained, train
from .plans import DP, EP, ZERO, Constraints

# Of sums in float64 that are added in another order; the contract of this repository is 1e-12.
RELATIVE = 1e-12


@cache
def on_one_device(family: str, implementation: str, parts: int) -> Trained:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(family, implementation, None, parts)
    finally:
        torch.set_num_threads(threads)


def check(
    world: World, plan: Constraints, family: str, implementation: str = "eager", parts: int = 0
) -> None:
    """Train under a plan and compare every rank with one device that accumulates."""
    parts = parts or plan[DP]
    expected = on_one_device(family, implementation, parts)
    for made in world.run(train, family, implementation, plan, parts):
        assert made.losses == pytest.approx(expected.losses, rel=RELATIVE, abs=0)
        assert made.norms == pytest.approx(expected.norms, rel=RELATIVE, abs=0)
        assert [*made.grads] == [*expected.grads]
        for name, grad in expected.grads.items():
            scale = float(grad.abs().max())
            torch.testing.assert_close(
                made.grads[name], grad, rtol=0, atol=RELATIVE * scale, msg=name
            )
        for name, parameter in expected.parameters.items():
            torch.testing.assert_close(
                # AdamW's first steps divide by gradients that may be nothing but rounding.
                made.parameters[name], parameter, rtol=0, atol=1e-10, msg=name
            )


OTHERS = [family for family in FAMILIES if family != "mixtral"]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_two_ranks_share_the_experts_of_mixtral(world2: World, implementation: str) -> None:
    check(world2, {DP: 2, EP: 2}, "mixtral", implementation)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_two_ranks_share_the_experts_of_a_family(
    world2: World, family: str, implementation: str
) -> None:
    check(world2, {DP: 2, EP: 2}, family, implementation)
