"""Losses that a program computes within torch.utils.checkpoint, to keep no logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints
from .programs import right
from .test_sum_ratios import Language, masked, picked, trained

ACCUMULATION = "batch.gradient_accumulation"
PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "dp-accumulation": {DP: 2, ACCUMULATION: 2},
    "zero3": {DP: 2, ZERO: 3},
    "zero3-accumulation": {DP: 2, ZERO: 3, ACCUMULATION: 2},
    "tp-accumulation": {TP: 2, ACCUMULATION: 2},
    "pp": {PP: 2, PARTS: 2},
    "pp-recompute": {PP: 2, PARTS: 2, "recompute": "full"},
}
Loss = Callable[[Language, Tensor, Mapping[str, Tensor]], Tensor]


def of_targets(model: Language, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"].masked_fill(batch["mask"] == 0, -100)
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten())


def of_words(model: Language, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    logits, labels = model.head(x).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="none").view_as(batch["labels"])


def of_mask(model: Language, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return masked(of_words(model, x, batch), batch["mask"])


def of_picked(model: Language, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return picked(of_words(model, x, batch), batch["mask"])


def of_two_kinds(model: Language, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The second one is of targets, behind a metric that nothing counts."""
    chances = model.head(x).detach().softmax(-1).amax(-1)
    _metric = chances.sum() / (chances > 0.5).sum().clamp(min=1)
    return of_mask(model, x, batch) + of_targets(model, x, batch)


def nested(model: Language, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return checkpoint(of_targets, model, x, batch, use_reentrant=False) + of_mask(model, x, batch)


LOSSES: list[Loss] = [of_targets, of_mask, of_picked, of_two_kinds, nested]


class Checkpointed(Language):
    """Computes its loss again in backward."""

    def __init__(self, loss: Loss, *, reentrant: bool) -> None:
        super().__init__(masked)
        self.loss, self.reentrant = loss, reentrant

    def features(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["words"])
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return self.loss(self, x, batch)

        return checkpoint(loss, self.features(batch), use_reentrant=self.reentrant)


class InChunks(Checkpointed):
    """Sums losses of some positions after the other, as programs with many words do."""

    def __init__(self) -> None:
        super().__init__(of_mask, reentrant=False)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        total, x = torch.zeros(()), self.features(batch)
        for begin in range(0, x.shape[1], 2):
            part = {name: each[:, begin : begin + 2] for name, each in batch.items()}
            run = functools.partial(self.summed, part)
            total = total + checkpoint(run, x[:, begin : begin + 2], use_reentrant=False)
        return total / batch["mask"].sum()

    def summed(self, batch: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return (of_words(self, x, batch) * batch["mask"]).sum()


@pytest.mark.by_day("True-of_targets-dp", "False-of_mask-zero3-accumulation", "False-nested-pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_that_runs_again_is_as_on_one_device(
    world2: World, reentrant: bool, loss: Loss, plan: str
) -> None:
    make = functools.partial(Checkpointed, loss, reentrant=reentrant)
    right(world2, functools.partial(trained, make=make), PLANS[plan])


@pytest.mark.by_day("dp-accumulation", "pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_in_chunks_is_as_on_one_device(world2: World, plan: str) -> None:
    right(world2, functools.partial(trained, make=InChunks), PLANS[plan])
