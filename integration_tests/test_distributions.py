"""Models whose forward makes ``torch.distributions``, which look at values, are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, Normal, kl_divergence
from torch.optim import SGD

import vescale
from vescale_testing import World

from .plans import TP
from .programs import TENSOR, WIDTH, Run, right, rows


class Policy(nn.Module):
    """Says how likely actions are (PPO)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.log_std = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean = self.actor(x)
        chances = Normal(mean, self.log_std.expand_as(mean).exp())
        return -(chances.log_prob(y).sum(1) + 0.01 * chances.entropy().sum(1)).mean()


class Autoencoder(nn.Module):
    """Draws what it decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, log_std = self.encoder(x).chunk(2, 1)
        given = Normal(mean, log_std.exp())
        logits = self.decoder(given.rsample())
        likelihood = Independent(Bernoulli(logits=logits), 1).log_prob((y > 0).to(x.dtype))
        divergence = kl_divergence(given, Normal(torch.zeros_like(mean), 1.0)).sum(1)
        return (divergence - likelihood).mean()


def trained(make: Callable[[], nn.Module], run: Run) -> None:
    model: Any = make().double()
    batches = rows()
    if run.constraints is not None:
        example = tuple(batches[0].values())
        plan = vescale.generate_plan(model, run.constraints, example_batch=example)
        assert plan.tensor_parallel.size == run.constraints[TP]
        assert plan.tensor_parallel.sharding_plan
        model = vescale.parallelize(plan, model)
        assert Distribution._validate_args
    optimizer = SGD(model.parameters(), lr=0.1)
    for batch in batches:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def policy(run: Run) -> None:
    trained(Policy, run)


def autoencoder(run: Run) -> None:
    trained(Autoencoder, run)


@pytest.mark.slow
@pytest.mark.parametrize("program", [policy, autoencoder])
def test_models_with_distributions_are_cut_by_features(
    world2: World, program: Callable[[Run], None]
) -> None:
    right(world2, program, TENSOR)
