"""The factor of a loss that is known after its gradients were computed."""

from __future__ import annotations

import pytest
import torch

from vescale_parallel._loss.loss_scale import LossScale


def test_the_factor_of_the_step_before_is_used() -> None:
    scale = LossScale()
    assert scale.correction(torch.tensor(2.0**16), used=scale.value) == 2.0**16
    assert scale.value == 2.0**16
    assert scale.correction(torch.tensor(2.0**15), used=scale.value) == 0.5
    assert scale.value == 2.0**15


@pytest.mark.parametrize("factor", [1.0, 2.0**16])
def test_gradients_are_not_multiplied_by_one(factor: float) -> None:
    scale = LossScale()
    scale.correction(torch.tensor(factor), used=scale.value)
    assert scale.correction(torch.tensor(factor), used=scale.value) is None


@pytest.mark.parametrize("factor", [0.0, 0.5, 3.0, -4.0, 2.0**41, float("inf"), float("nan")])
def test_a_factor_that_could_change_other_bits_is_not_kept(factor: float) -> None:
    scale = LossScale()
    scale.correction(torch.tensor(8.0), used=1.0)
    corrected = scale.correction(torch.tensor(factor), used=8.0)
    assert corrected is not None
    assert torch.equal(corrected, torch.tensor(factor) / 8) or factor != factor
    assert scale.value == 1.0


def test_calls_in_between_keep_the_factor_that_they_used() -> None:
    scale = LossScale()
    first = second = scale.value
    assert scale.correction(torch.tensor(4.0), used=first) == 4.0
    assert scale.correction(torch.tensor(4.0), used=second) == 4.0
