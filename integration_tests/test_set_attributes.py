"""Attributes that a model sets in its layers before it calls them, where rows of a batch meet."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, TP
from .programs import DATA, WIDTH, Run, right

Batch = Mapping[str, Tensor]


class Styled(nn.Module):
    """Scales with what it is told."""

    style: Tensor
    count = 1

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * self.style


class Normed(Styled):
    """Normalizes over the batch, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x - x.mean(0)) * self.style


class Counted(Styled):
    """Is told how many rows there are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) - x.sum(0) / self.count


class Around(nn.Module):
    """Has the layer that is told one level deeper."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Outer(nn.Module):
    """Sets styles of two layers: of every row, or of all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "beside a norm" else nn.Identity()
        layer = {"norms": Normed, "counts": Counted}.get(kind, Styled)
        self.styled = nn.ModuleList(layer() for _ in range(2))
        self.layers = nn.ModuleList(
            Around(each) if kind == "deep" else each for each in self.styled
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        x = self.norm(self.first(batch["x"]))
        style = x.mean(0) if self.kind == "of all rows" else torch.sigmoid(batch["y"])
        for each in self.styled:
            assert isinstance(each, Styled)
            each.style = style
            each.count = len(x)
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        loss = F.mse_loss(x, batch["y"])
        if self.kind in ("beside a loss", "deep"):
            loss = loss + 0.01 * (x.T @ x / len(x)).square().mean()
        return loss


class Within(nn.Module):
    """Calls it with a batch of which it returns the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.outer = Outer(kind)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> Tensor:
        return self.outer({name: x * self.scale for name, x in batch.items()})


KINDS = ["beside a norm", "beside a loss", "of all rows", "norms", "counts", "deep"]


def trained(kind: str, run: Run) -> None:
    run.train(Outer(kind))


def within(kind: str, run: Run) -> None:
    run.train(Within(kind))


@pytest.mark.slow
@pytest.mark.by_day("dp-*", "zero3-norms")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", DATA)
def test_layers_are_told_of_the_rows_that_they_get(world2: World, plan: str, kind: str) -> None:
    right(world2, functools.partial(trained, kind), DATA[plan])


@pytest.mark.slow
@pytest.mark.by_day("norms", "deep")
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_of_a_module_within(world2: World, kind: str) -> None:
    right(world2, functools.partial(within, kind), DATA["zero3"])


@pytest.mark.slow
@pytest.mark.by_day("of all rows")
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_beside_tensor_parallel_layers(world4: World, kind: str) -> None:
    right(world4, functools.partial(trained, kind), {DP: 2, TP: 2})
