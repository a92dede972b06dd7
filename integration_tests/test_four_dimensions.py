"""Fifty steps in four dimensions beside one device, as the page on numbers shows them."""

from __future__ import annotations

import pytest

from docs.four_dimensions import PLANS, compared

STEPS = 50


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in PLANS if name != "Mixtral"])
def test_fifty_steps_have_the_bits_of_one_device(name: str) -> None:
    found = compared(name, STEPS)
    assert found["losses"][-1] < found["losses"][0] / 2
    assert found["equal_bits"], found


@pytest.mark.nightly
def test_fifty_steps_with_experts_are_one_devices_within_rounding() -> None:
    found = compared("Mixtral", STEPS)
    assert found["losses"][-1] < found["losses"][0] / 2
    assert found["largest_loss_difference"] < 5e-6
    assert found["largest_parameter_difference"] < 2e-4
