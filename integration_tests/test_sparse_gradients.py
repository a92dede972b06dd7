"""Tables of a recommender with ``sparse=True``, whose gradients are sparse tensors."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import TP, Constraints
from .programs import DATA, WIDTH, Block, Run, right

PLANS: dict[str, Constraints] = {**DATA, "tp": {TP: 2}}


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(6, WIDTH, sparse=True)
        self.items = nn.EmbeddingBag(6, WIDTH, sparse=True, mode="sum")
        self.block = Block()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        numbers = (batch["x"].abs() * 2).long().clamp(max=5)
        bag = self.items(numbers[:, 1], torch.arange(len(numbers)))
        return F.mse_loss(self.block(self.users(numbers[:, 0]) * bag), batch["y"])


def recommended(run: Run) -> None:
    run.train(Recommender())


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_tables_with_sparse_gradients_train_as_on_one_device(world2: World, plan: str) -> None:
    right(world2, recommended, PLANS[plan])
