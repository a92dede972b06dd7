"""Forwards that mix rows by chance, or add noise, are one device's, or refused by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints
from .programs import WIDTH, Plain, Run, both, right
from .test_bad_input import check

pytestmark = pytest.mark.slow


class Mixing(Plain):
    """Mixes every row with another one, before the model or within it."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, y = batch["x"], batch["y"]
        order = torch.randperm(len(x))
        y = 0.7 * y + 0.3 * y[order]
        if not self.inside:
            return F.mse_loss(self.logits({"x": 0.7 * x + 0.3 * x[order]}), y)
        hidden = self.embed(x)
        hidden = 0.7 * hidden + 0.3 * hidden[order]
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(self.head(hidden), y)


class Variational(Plain):
    """Adds noise to what its blocks get, of a width that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        mean = self.embed(batch["x"])
        spread = self.spread(batch["x"])
        z = mean + (0.5 * spread).exp() * torch.randn_like(mean)
        for block in self.blocks:
            z = block(z)
        divergence = (mean.square() + spread.exp() - 1 - spread).mean()
        return F.mse_loss(self.head(z), batch["y"]) + 0.1 * divergence


def mixing(inside: bool, run: Run) -> None:
    run.train(Mixing(inside=inside))


def variational(run: Run) -> None:
    run.train(Variational())


@pytest.mark.by_day("False-plan0")
@pytest.mark.parametrize("plan", [{DP: 2}, {DP: 2, ZERO: 3}, {TP: 2}])
@pytest.mark.parametrize("inside", [False, True])
def test_rows_are_mixed_with_those_of_all_ranks(
    world2: World, inside: bool, plan: Constraints
) -> None:
    right(world2, functools.partial(mixing, inside), plan)


@pytest.mark.by_day("plan0")
@pytest.mark.parametrize("plan", [{PP: 2, PARTS: 2}, {DP: 2, "batch.gradient_accumulation": 2}])
def test_micro_batches_refuse_to_mix_rows(world2: World, plan: Constraints) -> None:
    message = "rows of the batch depend on each other"
    message += ".* compute the loss in the loop" if PP in plan else ""
    check(world2, ValueError, message, both, functools.partial(mixing, False), plan)


@pytest.mark.by_day("plan0")
@pytest.mark.parametrize("plan", [{DP: 2}, {TP: 2}])
def test_noise_between_layers_is_that_of_one_device(world2: World, plan: Constraints) -> None:
    right(world2, variational, plan)
