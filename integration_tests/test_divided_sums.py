"""Losses that are sums divided by the number of rows, as variational autoencoders have them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, Constraints
from .programs import ALL, WIDTH, Block, Run, right

PLANS: dict[str, Constraints] = {
    **ALL,
    "accumulation": {DP: 2, "batch.gradient_accumulation": 2},
}


class Autoencoder(nn.Module):
    """Rebuilds its rows from what it draws around a code of each."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        mean, log_variance = self.code(batch["x"]).chunk(2, -1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        for block in self.blocks:
            z = block(z)
        target = batch["y"].sigmoid()
        rebuilt = F.binary_cross_entropy_with_logits(self.head(z), target, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())
        return (rebuilt + divergence) / len(target)


def trained(run: Run) -> None:
    run.train(Autoencoder())


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_sum_divided_by_rows_trains_as_on_one_device(world2: World, plan: str) -> None:
    right(world2, trained, PLANS[plan])
