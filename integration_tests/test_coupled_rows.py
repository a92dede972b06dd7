"""Rows of a batch that meet, in a loss or in a layer: one device's numbers, or a refusal."""

from __future__ import annotations

from functools import partial

import pytest

from vescale_testing import World

from . import coupled_layers, coupled_losses
from .coupled_layers import MODELS
from .coupled_losses import ALONE, LOSSES, Net
from .judge import Trial, judge
from .plans import DP, PARTS, PP, TP, ZERO, Constraints

# Name: ranks, rows of the global batch, plan.
PLANS: dict[str, tuple[int, int, Constraints]] = {
    "dp": (2, 8, {DP: 2}),
    "dp-3-rows": (2, 6, {DP: 2}),
    "zero1": (2, 8, {DP: 2, ZERO: 1}),
    "zero2": (2, 8, {DP: 2, ZERO: 2}),
    "zero3": (2, 8, {DP: 2, ZERO: 3}),
    "tp": (2, 8, {TP: 2}),
    "tp-dp": (4, 8, {TP: 2, DP: 2}),
    "pp": (2, 8, {PP: 2, PARTS: 2}),
}


@pytest.fixture
def worlds(world2: World, world4: World) -> dict[int, World]:
    return {2: world2, 4: world4}


def of_loss(name: str, rows: int) -> Trial:
    return Trial(build=partial(Net, name), batches=partial(coupled_losses.batches, rows))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_the_batch_is_one_devices(
    worlds: dict[int, World], name: str, plan: str
) -> None:
    ranks, rows, constraints = PLANS[plan]
    judgement = judge(worlds, of_loss(name, rows), ranks, constraints)
    allowed = {"equal"} if name in ALONE or plan == "tp" else {"equal", "refused"}
    assert judgement.verdict in allowed, judgement.detail


def of_model(name: str, rows: int) -> Trial:
    model = MODELS[name]
    return Trial(
        build=partial(coupled_layers.build, name),
        batches=partial(coupled_layers.batches, name, rows),
        optimizer="adamw",
        row_dim=model.row_dim,
        casts=model.casts,
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_over_the_batch_is_one_devices(
    worlds: dict[int, World], name: str, plan: str
) -> None:
    ranks, rows, constraints = PLANS[plan]
    judgement = judge(worlds, of_model(name, rows), ranks, constraints)
    refusable = MODELS[name].meet or plan == "pp"
    allowed = {"equal", "refused"} if refusable else {"equal"}
    assert judgement.verdict in allowed, judgement.detail
