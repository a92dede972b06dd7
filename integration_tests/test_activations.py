"""Activation functions between the layers of a pair."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import propose_sharding
from vescale_testing import World

from .plans import TP
from .training import whole

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


def gradients(names: tuple[str, ...], size: int) -> dict[str, Tensor]:
    model: nn.Module = build(names)
    if size > 1:
        plan = vescale.generate_plan(model, {TP: size}, world_size=size, example_batch=batch())
        model = vescale.parallelize(plan, model)
    model(batch()).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def test_two_ranks_have_the_gradients_of_one(world2: World) -> None:
    names = ("Hardswish", "PReLU")
    expected = gradients(names, 1)
    for found in world2.run(gradients, names, 2):
        assert found.keys() == expected.keys()
        for name, grad in found.items():  # sums over ranks are in another order
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14, msg=name)
