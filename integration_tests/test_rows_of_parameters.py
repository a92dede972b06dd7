"""Rows that are made of parameters alone, beside those of a batch: log-determinants of flows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from vescale_testing import World

from .programs import DATA, WIDTH, Program, Run, right

Batch = Mapping[str, Tensor]


class ActNorm(nn.Module):
    """Scales features to variance one in its first batch, by parameters that it sets (Glow)."""

    is_set: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.log_scale = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_set.item() == 0:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.log_scale.copy_(-x.std(0).log())
                self.is_set.fill_(1)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))


class Centered(nn.Module):
    """The same with statistics of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (x - x.mean(0)) * self.log_scale.exp()
        return x, self.log_scale.sum().expand(len(x))


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.net = nn.Sequential(nn.Linear(half, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        log_scale, shift = self.net(kept).chunk(2, 1)
        log_scale = log_scale.tanh()
        return torch.cat([moved * log_scale.exp() + shift, kept], 1), log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2) for kind in (norm, Coupling))

    def forward(self, batch: Batch) -> Tensor:
        x, log_det = batch["x"], 0
        for layer in self.layers:
            x, each = layer(x)
            log_det = log_det + each
        return (0.5 * x.square().sum(1) - log_det).mean()


def set_by_data(run: Run) -> None:
    run.train(Flow(ActNorm))


def centered(run: Run) -> None:
    run.train(Flow(Centered))


@pytest.mark.slow
@pytest.mark.parametrize("plan", DATA)
@pytest.mark.parametrize("program", [set_by_data, centered])
def test_code_over_all_rows_returns_rows_of_parameters(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, DATA[plan])
