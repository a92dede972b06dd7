"""Weights that torch's parametrizations compute train as on one device, cut as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD

import vescale

from .plans import TP
from .training import whole

orthogonal = parametrizations.orthogonal


class Rounded(nn.Module):
    """Weights of a few levels, with the gradient of what they are rounded from."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (weight.clamp(-1, 1).round() - weight).detach()


def rounded(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", Rounded())


def _householder(module: nn.Module) -> None:
    """Its products are of what should be 1 or -1, as integers."""
    orthogonal(module, orthogonal_map="householder")


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "householder": _householder,
    "matrix_exp": functools.partial(orthogonal, orthogonal_map="matrix_exp"),
    "cayley": functools.partial(orthogonal, orthogonal_map="cayley"),
    "weight_norm": parametrizations.weight_norm,
    "rounded": rounded,
}


class Residual(nn.Module):
    def __init__(self, kind: str, layer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        KINDS[kind](getattr(self, layer))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.relu(self.up(x))))


def trained(kind: str, layer: str, size: int) -> dict[str, Tensor]:
    """Return the parameters after three steps, and what the model returns then."""
    model: Any = Residual(kind, layer)
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if size > 1:
        plan = vescale.generate_plan(model, {TP: size}, world_size=size, example_batch=x)
        model = vescale.parallelize(plan, model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    found = {fqn: whole(p).detach().clone() for fqn, p in model.named_parameters()}
    return {**found, "output": whole(model(x)).detach()}


@pytest.mark.parametrize(
    ("kind", "layer"),
    # A rank that has part of a row does not know how long the row is.
    [
        (kind, layer)
        for kind in KINDS
        for layer in ("up", "down")
        if kind + layer != "weight_normdown"
    ],
)
def test_computed_weights_train_as_on_one_device(kind: str, layer: str) -> None:
    """A weight with more rows than columns, and one with fewer."""
    expected = trained(kind, layer, 1)
    for found in vescale.emulate(trained, 2, args=(kind, layer, 2)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
