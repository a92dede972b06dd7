"""Models of text and images generate and train as on one device, ranks for their rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import vescale
from vescale_dtensor import GatherWarning
from vescale_testing import World

from .families import InDouble
from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .test_bad_input import check
from .training import whole
from .vision_language import ROWS, batch_of, build, rows_of, with_labels

PLANS: dict[str, Constraints] = {
    "zero1": {DP: 2, ZERO: 1},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
}


def generated(
    constraints: Constraints | None, beams: int, images: int, rows: int = ROWS
) -> Tensor:
    """Return what is generated behind images and text."""
    model: Any = build()
    batch: dict[str, Any] = batch_of(3, images=images, rows=rows)
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    model.eval()
    if (constraints or {}).get(DP, 1) > 1:
        batch = rows_of(batch, vescale.data_parallel_rank(model), 2)
    options = {"num_beams": beams, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with warnings.catch_warnings(), InDouble():
        warnings.simplefilter("ignore", GatherWarning)
        # Calls with what calls before them kept cannot be compared: ranks have parts of it.
        warnings.filterwarnings("ignore", "the sharding plan was not compared")
        return model.generate(**batch, **options)


def same_as_one_device(
    world2: World, plan: str, beams: int, images: int, rows: int = ROWS
) -> None:
    expected = generated(None, beams, images, rows)
    ranks = world2.run(generated, PLANS[plan], beams, images, rows)
    if DP in PLANS[plan]:
        assert torch.equal(torch.cat(ranks), expected)
    else:
        assert all(torch.equal(each, expected) for each in ranks)


@pytest.mark.by_day("1-zero2")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("beams", [1, 2])
def test_images_are_given_to_the_first_call(world2: World, plan: str, beams: int) -> None:
    same_as_one_device(world2, plan, beams, images=1)


# A rank has two of these rows, as many as a check runs on, or more.
@pytest.mark.by_day("8")
@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 8, 12, 16])
def test_rows_have_several_images(world2: World, rows: int) -> None:
    same_as_one_device(world2, "zero3", beams=1, images=2, rows=rows)


def trained(constraints: Constraints | None, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of this rank's rows, of two images each, and gradients of all rows."""
    model: Any = build()
    batch: dict[str, Any] = with_labels(batch_of(3, images=2, rows=rows))
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
        batch = rows_of(batch, vescale.data_parallel_rank(model), 2)
    with warnings.catch_warnings(), InDouble():
        warnings.filterwarnings("ignore", "it could not be checked whether rows")
        loss = model(**batch).loss
        loss.backward()
    gradients = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
    return whole(loss.detach()), {fqn: whole(grad) for fqn, grad in gradients.items()}


@pytest.mark.by_day("12")
@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 8, 12, 16])
def test_rows_of_several_images_train_as_on_one_device(world2: World, rows: int) -> None:
    loss, gradients = trained(None, rows)
    ranks = world2.run(trained, PLANS["zero3"], rows)
    torch.testing.assert_close(torch.stack([each for each, _ in ranks]).mean(), loss)
    for _, found in ranks:
        for fqn, gradient in gradients.items():
            if gradient.any():
                torch.testing.assert_close(found[fqn], gradient, msg=fqn)


@pytest.mark.nightly
@pytest.mark.slow
def test_beams_with_several_images_a_row_encode_them_outside_of_calls(world2: World) -> None:
    same_as_one_device(world2, "tp", beams=2, images=2)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "pp"])
def test_beams_with_several_images_a_row_are_refused_where_a_tower_is_in_parts(
    world2: World, plan: str
) -> None:
    check(world2, ValueError, "one image in each row", generated, PLANS[plan], 2, 2)
