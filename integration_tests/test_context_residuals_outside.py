"""Ranks that share a sequence in models that add residuals outside of their blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vescale_testing import World

from .plans import CP, DP, PARTS, PP, TP, ZERO, Constraints
from .residuals_outside import BY_HAND
from .test_bad_input import check as refused
from .test_compile_context import COMPILED, LENGTHS, METHOD, trained
from .test_context_parallel import check


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_HAND)
def test_two_ranks_train_as_one_device(world2: World, family: str) -> None:
    check(world2, {CP: 2}, family, length=13)


@pytest.mark.by_day("flat")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["nested", "flat"])
def test_three_ranks_of_a_ring_do(world3: World, family: str) -> None:
    check(world3, {CP: 3, METHOD: "ring"}, family, length=13)


@pytest.mark.by_day("nested-more0")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("nested", {TP: 2}),
        ("nested", {DP: 2, ZERO: 3}),
        ("nested, written out", {DP: 2, ZERO: 2}),
        ("flat", {TP: 2}),
        ("flat", {DP: 2, ZERO: 3}),
        ("flat", {PP: 2, PARTS: 2}),
    ],
)
def test_besides_other_axes(world4: World, family: str, more: Constraints) -> None:
    check(world4, {CP: 2, **more}, family, length=13)


@pytest.mark.by_day("nested-more0")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("nested", {"recompute": "full"}),
        ("flat", {"recompute": "full"}),
        ("nested, written out", {"recompute": "full"}),
        ("nested", {"recompute": "selective"}),
        ("flat", {"batch.gradient_accumulation": 2}),
    ],
)
def test_blocks_within_run_again(world2: World, family: str, more: Constraints) -> None:
    check(world2, {CP: 2, **more}, family, length=13)


def trained_with_a_warning() -> dict[str, Tensor]:
    message = "'body.layers...0' runs as it is written .* its own forward attends to what other"
    with pytest.warns(UserWarning, match=message):
        found, report = trained("nested", {CP: 2, **COMPILED}, LENGTHS)
    assert report["body.layers.0.0"].eager
    assert not report["body.layers.0.1"].eager
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_what_does_not_attend_is_compiled(world2: World) -> None:
    expected, _ = trained("nested", None, LENGTHS)
    for found in world2.run(trained_with_a_warning):
        for name, x in found.items():
            # float64; slices are added up in another order.
            torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
def test_masks_of_what_is_compiled_are_refused_by_name(world2: World) -> None:
    message = "code of 'body.layers.0.0' itself, which is compiled, makes masks"
    refused(
        world2, ValueError, message, trained, "nested, written out", {CP: 2, **COMPILED}, (13,)
    )
