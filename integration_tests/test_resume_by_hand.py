"""Runs of one device go on under plans and back, and optimizers that were made by hand, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .models import HandWritten
from .plans import DP, TWO, Constraints, make_plan
from .training import ROWS, samples, whole

STEPS, END = 2, 4
# Who makes the optimizer: torch without veScale, the program after parallelize, or parallelize.
KINDS = ("alone", "by hand", "parallelized")
ZERO3, PIPELINE = TWO["zero3"], TWO["pp-1f1b"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0}], lr=1e-2)


def start(kind: str, constraints: Constraints) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = HandWritten().double()
    if kind == "parallelized":
        model, optimizer = vescale.parallelize(make_plan(constraints), model, adamw)
    elif kind == "by hand":
        model = vescale.parallelize(make_plan(constraints), model)
        optimizer = adamw(model)
    else:
        optimizer = adamw(model)
    return {"model": model, "optimizer": optimizer}


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: range, ranks: int = 1
) -> list[float]:
    rows, losses = samples(END, uneven=True), list[float]()
    part = ROWS // ranks
    first = vescale.data_parallel_rank(model) * part if ranks > 1 else 0
    for step in steps:
        own = rows[step * ROWS + first :][:part]
        loss = model({name: torch.stack([row[name] for row in own]) for name in own[0]})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def data_ranks(kind: str, constraints: Constraints) -> int:
    return 1 if kind == "alone" else constraints.get(DP, 1)


def begin(path: str, kind: str, constraints: Constraints) -> None:
    state = start(kind, constraints)
    train(**state, steps=range(STEPS), ranks=data_ranks(kind, constraints))
    vescale.save(path, state)


def go_on(path: str, kind: str, constraints: Constraints) -> tuple[list[float], dict[str, Tensor]]:
    state = start(kind, constraints)
    vescale.load(path, state)
    losses = train(**state, steps=range(STEPS, END), ranks=data_ranks(kind, constraints))
    return losses, {n: whole(p) for n, p in state["model"].named_parameters()}


def uninterrupted() -> tuple[list[float], dict[str, Tensor]]:
    state = start("alone", {})
    losses = train(**state, steps=range(END))
    return losses[STEPS:], {n: p.detach() for n, p in state["model"].named_parameters()}


@pytest.mark.by_day("by hand-alone", "parallelized-alone")
@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [
    ("alone", "by hand"), ("alone", "parallelized"), ("by hand", "parallelized"),
    ("by hand", "alone"), ("parallelized", "by hand"), ("parallelized", "alone"),
])  # fmt: skip
def test_a_run_goes_on_by_whoever_made_its_optimizer(
    world1: World, world2: World, tmp_path: Path, saved: str, loaded: str
) -> None:
    (expected,) = world1.run(uninterrupted)
    worlds = [world1 if kind == "alone" else world2 for kind in (saved, loaded)]
    worlds[0].run(begin, str(tmp_path / "checkpoint"), saved, ZERO3)
    for losses, parameters in worlds[1].run(go_on, str(tmp_path / "checkpoint"), loaded, PIPELINE):
        # Stated by the contract of this repository, as in test_resume.
        assert losses == pytest.approx(expected[0], rel=1e-10, abs=0)
        for name, parameter in expected[1].items():
            torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-10)


def taken_by_hand(path: str) -> tuple[list[float], dict[str, Tensor]]:
    state = start("parallelized", ZERO3)
    saved = torch.load(path)
    state["model"].load_state_dict(saved["model"])
    state["optimizer"].load_state_dict(saved["optimizer"])
    losses = train(**state, steps=range(STEPS, END), ranks=2)
    return losses, {n: whole(p) for n, p in state["model"].named_parameters()}


@pytest.mark.slow
def test_a_plan_takes_what_torch_saved_on_one_device(
    world1: World, world2: World, tmp_path: Path
) -> None:
    (expected,) = world1.run(uninterrupted)
    state, path = start("alone", {}), str(tmp_path / "run.pt")
    train(**state, steps=range(STEPS))
    torch.save({name: each.state_dict() for name, each in state.items()}, path)
    for losses, parameters in world2.run(taken_by_hand, path):
        assert losses == pytest.approx(expected[0], rel=1e-10, abs=0)  # as above
        for name, parameter in expected[1].items():
            torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-10)
