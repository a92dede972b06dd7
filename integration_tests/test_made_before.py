"""Optimizers, and whatever else was made before parallelize, are told that they train nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import vescale
from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .programs import WIDTH, Plain
from .test_bad_input import check

PLANS: dict[str, Constraints] = {
    "one": {},
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
}


def world_of(plan: str, world1: World, world2: World) -> World:
    return world1 if plan == "one" else world2


def made_before(constraints: Constraints, kind: str, *, deferred: bool = False) -> None:
    """Use, after parallelize, what was made from the parameters before."""
    model: Any = vescale.deferred_init(Plain) if deferred else Plain()
    old = list(model.parameters())
    optimizer = AdamW(old, lr=0.1)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5)
    model = vescale.parallelize(make_plan(constraints), model)
    if kind == "zero_grad":
        optimizer.zero_grad()
    elif kind == "step":
        optimizer.step()
    elif kind == "scheduler":
        optimizer.step()
        scheduler.step()
    elif kind == "clip":
        torch.nn.utils.clip_grad_norm_(old, 1.0)
    elif kind == "gradients":
        print([p.grad for p in old])
    elif kind == "scaler":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
    elif kind == "average":
        torch.lerp(torch.zeros(WIDTH, WIDTH), old[0], 0.5)
    elif kind == "weight":
        F.linear(torch.zeros(1, old[0].shape[1]), old[0])


USES = ["zero_grad", "step", "scheduler", "clip", "gradients", "scaler", "average", "weight"]


@pytest.mark.by_day("average-dp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", USES)
def test_what_was_made_before_is_refused_when_it_is_used(
    world1: World, world2: World, kind: str, plan: str
) -> None:
    world = world_of(plan, world1, world2)
    check(world, ValueError, "before.*optimizer_fn", made_before, PLANS[plan], kind)


def deferred_step(constraints: Constraints) -> None:
    made_before(constraints, "step", deferred=True)


@pytest.mark.by_day("one")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["one", "zero3"])
def test_an_optimizer_of_deferred_parameters_is_refused(
    world1: World, world2: World, plan: str
) -> None:
    world = world_of(plan, world1, world2)
    check(world, ValueError, "AdamW holds 20 parameters", deferred_step, PLANS[plan])
