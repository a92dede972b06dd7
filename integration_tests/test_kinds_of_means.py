"""Losses of torch that are means over rows, and losses in vectors, in micro-batches too."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PARTS, PP, ZERO, Constraints
from .programs import WIDTH, Plain, Run, right

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3-accumulation": {DP: 2, ZERO: 3, "batch.gradient_accumulation": 2},
    "pp": {PP: 2, PARTS: 2},
}


class MixedLabels(Plain):
    """Learns mixtures of labels (Zhang et al., "mixup", 2018): probabilities of classes."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.logits(batch), batch["y"].softmax(-1), label_smoothing=0.1)


class Uncertain(Plain):
    """Learns how to weigh its losses (Kendall et al., 2018), and counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))
        self.scale: Tensor
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.logits(batch)
        margins = F.multi_margin_loss(x, batch["y"].argmax(-1) % WIDTH)
        losses = torch.stack([F.mse_loss(x, batch["y"]), margins])
        return ((-self.weights).exp() * losses + self.weights).sum() * self.scale


def trained(make: type[Plain], run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that the loss may be no mean over rows
        run.train(make())


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [MixedLabels, Uncertain], ids=lambda make: make.__name__)
def test_means_over_rows_train_as_on_one_device(
    world2: World, make: type[Plain], plan: str
) -> None:
    right(world2, functools.partial(trained, make), PLANS[plan])
