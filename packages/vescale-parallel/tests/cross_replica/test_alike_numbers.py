"""Numbers of rows that are all alike in a first batch, and need not stay so: weights, masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._cross_replica.call_guard import RowGuard

# What is made of the loss of each row and its number.
Loss = Callable[[Tensor, Tensor], Tensor]


class Weighted(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        return self.loss((self.layer(x) - y).square().mean((1, 2)), weights)


def by_a_total_read(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).mean() * (len(weights) / float(weights.sum()))


def by_a_mean_read(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).mean() / weights.double().mean().item()


def by_the_largest(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * (weights / weights.max())).mean()


def by_how_many_are_positive(losses: Tensor, weights: Tensor) -> Tensor:
    is_positive = (weights > 0.5).double()
    total = is_positive.sum()
    ratio = (len(weights) - total) / total.clamp(min=1)
    return F.binary_cross_entropy_with_logits(losses, is_positive, pos_weight=ratio)


def by_their_own(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).mean()


ALIKE = {
    "ones": torch.ones(8, dtype=torch.float64),
    "zeros": torch.zeros(8, dtype=torch.float64),
    "all": torch.ones(8, dtype=torch.bool),
}


def _regions(loss: Loss, weights: Tensor) -> set[str]:
    torch.manual_seed(0)
    x, y = (torch.randn(8, 5, 4, dtype=torch.float64) for _ in range(2))
    model = Weighted(loss).double()
    guard = RowGuard(model, lambda mine: [mine])
    return {*guard.coupling(model, (x, weights, y), {})[0].regions}


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        (by_a_total_read, "ones"),
        (by_a_mean_read, "ones"),
        (by_the_largest, "ones"),
        (by_how_many_are_positive, "ones"),
        (by_how_many_are_positive, "zeros"),
        (by_a_total_read, "all"),
        (by_a_mean_read, "all"),
    ],
)
def test_what_divides_by_alike_numbers_of_all_rows_is_seen(loss: Loss, weights: str) -> None:
    assert _regions(loss, ALIKE[weights])


@pytest.mark.parametrize("weights", ALIKE)
def test_rows_weighted_by_their_own_numbers_are_independent(weights: str) -> None:
    assert not _regions(by_their_own, ALIKE[weights])


def by_class_counts(losses: Tensor, labels: Tensor) -> Tensor:
    is_there = labels != 0
    counts = torch.stack([(~is_there).sum(), is_there.sum()]).double()
    weights = counts.sum() / counts.clamp(min=1)
    return (losses * weights[is_there.long()]).mean()


def by_positive_weight(losses: Tensor, labels: Tensor) -> Tensor:
    is_there = (labels != 0).double()
    ratio = (1 - is_there).sum() / is_there.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(losses, is_there, pos_weight=ratio)


def by_each(losses: Tensor, labels: Tensor) -> Tensor:
    return (losses * (1 + labels.double())).mean()


class OfClasses(Weighted):
    """Has several labels of each row, as weights: of classes, pixels, words."""

    def forward(self, x: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        return self.loss((self.layer(x) - y).square().mean(-1), weights)


NONE_THERE = {
    "float": torch.zeros(8, 5, dtype=torch.float64),
    "int": torch.zeros(8, 5, dtype=torch.int64),
    "bool": torch.zeros(8, 5, dtype=torch.bool),
}


def _regions_of_classes(loss: Loss, labels: Tensor) -> set[str]:
    torch.manual_seed(0)
    x, y = (torch.randn(8, 5, 4, dtype=torch.float64) for _ in range(2))
    model = OfClasses(loss).double()
    guard = RowGuard(model, lambda mine: [mine])
    return {*guard.coupling(model, (x, labels, y), {})[0].regions}


@pytest.mark.parametrize("labels", NONE_THERE)
@pytest.mark.parametrize("loss", [by_class_counts, by_positive_weight])
def test_what_counts_labels_of_which_none_is_there_yet_is_seen(loss: Loss, labels: str) -> None:
    assert _regions_of_classes(loss, NONE_THERE[labels])


@pytest.mark.parametrize("labels", NONE_THERE)
def test_rows_with_labels_of_their_own_are_independent(labels: str) -> None:
    assert not _regions_of_classes(by_each, NONE_THERE[labels])


def by_lengths(losses: Tensor, lengths: Tensor) -> Tensor:
    """Of rows of no length it is no number."""
    return (losses * lengths / lengths * (lengths / lengths.double().mean())).mean()


def test_made_up_numbers_that_do_not_fit_leave_others_to_try() -> None:
    assert _regions(by_lengths, torch.full((8,), 2))
