"""A module is told how many rows a batch has, in a model in which rows meet elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, ZERO
from .programs import WIDTH, Run, right


class Positions(nn.Module):
    """Makes one for every row of a batch, as encodings of pictures' places do."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, WIDTH)

    def forward(self, rows: int, steps: int) -> Tensor:
        times = torch.arange(3 * steps, dtype=torch.float64).view(steps, 3)
        return self.project(times.sin()).repeat(rows, 1, 1)


class Normalized(nn.Module):
    """Adds positions to what a batch norm returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.positions = nn.BatchNorm1d(WIDTH), Positions()
        self.head = nn.Linear(WIDTH, WIDTH)

    def results(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.norm(batch["x"])[:, None].expand(-1, 4, -1)
        # Places in a picture, which flatten as many rows as the batch has.
        places = self.positions(x.shape[0], 4).reshape(x.shape[0], -1, WIDTH)
        return self.head((x + places).tanh())

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.results(batch).mean(1) - batch["y"]).square().mean()


class SumOverRows(nn.Module):
    """Is a loss that is told by how much to divide."""

    def forward(self, x: Tensor, rows: int) -> Tensor:
        return x.square().sum() / rows


class Divided(Normalized):
    """Has its loss in a module that needs the number of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = SumOverRows()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(self.results(batch).mean(1) - batch["y"], len(batch["x"]))


def positions(run: Run) -> None:
    run.train(Normalized())


def divided(run: Run) -> None:
    run.train(Divided())


@pytest.mark.by_day("0-divided")
@pytest.mark.parametrize("program", [positions, divided])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_that_is_told_the_number_of_rows(
    world2: World, program: Callable[[Run], None], stage: int
) -> None:
    right(world2, program, {DP: 2, ZERO: stage})
