"""What lies outside of blocks is compared with one device, too, or stays whole with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .one_device import proposed


class Block(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stacked(nn.Module):
    """Three blocks; what comes before and behind them is what tests vary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ConvolutionStem(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(12, 24, 3, padding=1), nn.Conv1d(24, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.gelu(self.first(x.transpose(1, 2)))).transpose(1, 2)
        return self.through(x)


class FunctionalHead(Stacked):
    """Layers that are not modules, of parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.zeros(24, 12)), nn.Parameter(torch.zeros(24))
        self.w2, self.b2 = nn.Parameter(torch.zeros(12, 24)), nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        return F.linear(F.gelu(F.linear(x, self.w1, self.b1)), self.w2, self.b2)


class ScaledHead(Stacked):
    """A whole parameter that meets what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.through(x))) * self.scale)


SEQUENCE = (torch.linspace(-1, 1, 2 * 6 * 12).view(2, 6, 12).double().sin(),)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [ConvolutionStem, FunctionalHead, ScaledHead])
def test_outside_of_blocks_nothing_is_wrong(make: Callable[[], nn.Module], size: int) -> None:
    found = proposed(make, SEQUENCE, size)
    assert found.plan["blocks.*.up.weight"] == "Shard(0)"


def test_a_scale_that_meets_cut_features_has_its_gradient_summed() -> None:
    assert proposed(ScaledHead, SEQUENCE, 2).plan["scale.<grad>"] == "Partial()"


def test_what_the_check_refuses_is_named_with_the_reason() -> None:
    found = proposed(ConvolutionStem, SEQUENCE, 2).left_whole
    assert "differs" in found["first.weight, first.bias, second.weight"]
