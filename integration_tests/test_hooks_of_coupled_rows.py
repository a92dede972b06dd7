"""Hooks by which a model keeps what a layer returned, where the rows of a batch meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .programs import DATA, WIDTH, Block, Program, Run, right

Batch = Mapping[str, Tensor]


class Hooking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)
        self.block.register_forward_hook(self.keep)

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        raise NotImplementedError


class Centering(Hooking):
    """Keeps the running mean of what the layer returns, and takes it off, or only keeps it."""

    center: Tensor

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.is_read = is_read
        self.register_buffer("center", torch.zeros(WIDTH))

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        self.center.mul_(0.5).add_(0.5 * returned.detach().mean(0))

    def forward(self, batch: Batch) -> Tensor:
        x = self.block(batch["x"])
        return F.mse_loss(self.head(x - self.center if self.is_read else x), batch["y"])


class Scaling(Hooking):
    """Divides by the running mean of magnitudes, a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.magnitude = 1.0

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        self.magnitude = 0.5 * self.magnitude + 0.5 * returned.detach().abs().mean().item()

    def forward(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.head(self.block(batch["x"]) / self.magnitude), batch["y"])


class Correlated(Hooking):
    """Penalizes correlations of features over the rows, those that the hook kept."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []

    def keep(self, _: nn.Module, given: tuple[Any, ...], returned: Tensor) -> None:
        self.features.append(returned)

    def forward(self, batch: Batch) -> Tensor:
        loss = F.mse_loss(self.head(self.block(batch["x"])), batch["y"])
        features = self.features.pop()
        return loss + 0.01 * (features.T @ features / len(features)).square().mean()


def centered(run: Run) -> None:
    _train(run, Centering(is_read=True))


def center_kept(run: Run) -> None:
    _train(run, Centering(is_read=False))


def scaled(run: Run) -> None:
    run.train(Scaling())


def correlated(run: Run) -> None:
    run.train(Correlated())


def _train(run: Run, model: Centering) -> None:
    run.train(model)
    run.keep(model.center)


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
@pytest.mark.parametrize("program", [centered, center_kept, scaled, correlated])
def test_a_hook_of_the_model_gets_the_rows_of_all_ranks(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, DATA[plan])
