"""Activation functions between the layers of a pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_testing import World

from .plans import TP
from .sharded_layers import compare_gradients

WIDTH = 8
ACTIVATIONS = {
    each.__name__: each
    for each in (nn.CELU, nn.Hardswish, nn.Hardtanh, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.Softplus)
}


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


class Model(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(ACTIVATIONS[name]()) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build(names: tuple[str, ...]) -> nn.Module:
    torch.manual_seed(3)
    return Model(names).double()


def batch() -> Tensor:
    return torch.randn(
        4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def test_layers_around_each_of_them_are_sharded() -> None:
    model = build(tuple(ACTIVATIONS))
    plan = propose_sharding(model, "auto", 2, example_batch=batch())
    sharded = plan.sharded_parameters(model)
    for index, name in enumerate(ACTIVATIONS):
        assert {f"blocks.{index}.{each}.weight" for each in ("up", "down")} <= sharded, name


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one(world2: World) -> None:
    compare_gradients(world2, build, ("Hardswish", "PReLU"), batch(), {TP: 2})
