"""Pooling, interpolation and padding between the convolutions of a pair."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_testing import World

from .plans import TP
from .sharded_layers import compare_gradients

WIDTH, SIDE = 4, 4


def outlook(x: Tensor) -> Tensor:
    columns = F.unfold(x, 3, padding=1)  # (batch, channels * 9, places)
    return F.fold(columns.square(), (SIDE, SIDE), 3, padding=1)


def warped(x: Tensor) -> Tensor:
    line = torch.linspace(-0.8, 0.9, SIDE, dtype=x.dtype)
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
    return F.grid_sample(x, grid.expand(len(x), -1, -1, -1), align_corners=False)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda x: F.avg_pool2d(x, 3, 1, 1) - x,
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
    "largest": lambda x: F.max_pool2d(x, 2),
    "adaptive largest": lambda x: F.adaptive_max_pool2d(x, 2),
    "lines": lambda x: F.avg_pool1d(x.flatten(2), 2)[..., None],
    "volumes": lambda x: F.max_pool3d(x[..., None], (2, 2, 1)).squeeze(-1),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "smoothed": lambda x: F.interpolate(x, size=(3, 5), mode="bicubic", antialias=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "reflected": lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"),
    "replicated": lambda x: F.pad(x, (1, 1, 2, 0), mode="replicate"),
    "outlook": outlook,
    "warped": warped,
}


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(WIDTH, 8, 1), nn.Conv2d(8, WIDTH, 1)
        self.between = BETWEEN[name]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)).relu()).mean((2, 3), keepdim=True)


class Model(nn.Module):
    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(name) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build(names: Iterable[str]) -> nn.Module:
    torch.manual_seed(3)
    return Model(names).double()


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, WIDTH, SIDE, SIDE, dtype=torch.float64, generator=generator)


def test_convolutions_around_each_of_them_are_sharded() -> None:
    model = build(BETWEEN)
    sharded = propose_sharding(model, "auto", 2, example_batch=batch()).sharded_parameters(model)
    for index, name in enumerate(BETWEEN):
        assert {f"blocks.{index}.{each}.weight" for each in ("up", "down")} <= sharded, name


@pytest.mark.by_day("some")
@pytest.mark.slow
@pytest.mark.parametrize("names", [("average", "outlook"), tuple(BETWEEN)], ids=["some", "all"])
def test_two_ranks_have_the_gradients_of_one(world2: World, names: tuple[str, ...]) -> None:
    compare_gradients(world2, build, names, batch(), {TP: 2})
