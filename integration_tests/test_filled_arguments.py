"""Forwards that put things into the dicts that they are given, and forms of call in turn."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Generic, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PARTS, PP, SCHEDULE, VIRTUAL, ZERO, Constraints
from .programs import WIDTH, Block, Plain, Run, right, rows

pytestmark = pytest.mark.slow
TWO_STAGES: Constraints = {PP: 2, PARTS: 2}
ZBV: Constraints = {PP: 2, PARTS: 4, SCHEDULE: "zbv", VIRTUAL: 2}
T = TypeVar("T")


class Filling(Plain):
    """Every module reads what the one before put into the batch, as of SentenceTransformer."""

    def __init__(self, *, contrasts: bool) -> None:
        super().__init__()
        self.contrasts = contrasts

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        assert isinstance(batch, dict)
        batch["hidden"] = self.embed(batch["x"])
        for block in self.blocks:
            batch["hidden"] = block(batch["hidden"])
        batch["logits"] = self.head(batch["hidden"])
        if not self.contrasts:
            return F.mse_loss(batch["logits"], batch["y"])
        scores = batch["logits"] @ batch["y"].T
        return F.cross_entropy(scores, torch.arange(len(scores)))


def filling(run: Run) -> None:
    run.train(Filling(contrasts=False))


def contrasting(run: Run) -> None:
    run.train(Filling(contrasts=True))


class InTurn(Plain):
    """Returns rows, or a loss in which rows meet."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.logits(batch)
        if "weight" not in batch:
            return logits
        losses = (logits - batch["y"]).square().mean(-1)
        return (losses * batch["weight"]).sum() / batch["weight"].sum()


def in_turn(run: Run) -> None:
    """Look at rows without gradients between steps, as for old log-probabilities."""
    model, optimizer = run.start(InTurn())
    for batch in rows():
        weight = torch.arange(1.0, len(batch["x"]) + 1, dtype=torch.float64)
        own = run.part({**batch, "weight": weight})
        loss = model(own)
        with torch.no_grad():
            model({"x": own["x"]})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen = model({"x": batch["x"]})
        run.keep(loss)
        run.keep(seen)
    run.finish(model)


class Checked(ABC, Block):
    """A block whose class's first base is no module."""


class OfKind(Generic[T], Plain):
    """Likewise a model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Checked() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)


def of_kind(run: Run) -> None:
    run.train(OfKind[int]())


@pytest.mark.by_day("plan0")
@pytest.mark.parametrize("plan", [{DP: 2, ZERO: 3}, TWO_STAGES, ZBV])
def test_a_forward_may_put_what_it_computes_into_its_argument(
    world2: World, plan: Constraints
) -> None:
    right(world2, filling, plan)


def test_rows_may_meet_in_a_forward_that_puts_more_into_its_argument(world2: World) -> None:
    right(world2, contrasting, {DP: 2})


@pytest.mark.by_day("plan0")
@pytest.mark.parametrize("plan", [{DP: 2}, {DP: 2, "recompute": "full"}])
def test_rows_that_meet_in_one_form_of_call_do_not_in_another(
    world2: World, plan: Constraints
) -> None:
    right(world2, in_turn, plan)


@pytest.mark.parametrize("plan", [{DP: 2}, TWO_STAGES])
def test_classes_may_begin_with_a_base_that_is_no_module(world2: World, plan: Constraints) -> None:
    right(world2, of_kind, plan)
