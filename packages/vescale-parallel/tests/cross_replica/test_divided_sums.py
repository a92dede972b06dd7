"""Sums over rows that are divided by how many there are are means over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._cross_replica.call_guard import RowGuard

Loss = Callable[[Tensor, Tensor], Tensor]


class Trained(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(6, 6), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def evidence(x: Tensor, y: Tensor) -> Tensor:
    """A reconstruction and a divergence, both summed, by rows."""
    rebuilt = F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="sum")
    divergence = -0.5 * torch.sum(1 + x - x.square() - x.exp())
    return (rebuilt + 0.1 * divergence) / x.size(0)


def added_up(x: Tensor, y: Tensor) -> Tensor:
    total = 0
    for column in range(x.shape[1]):
        total = total + (x[:, column] - y[:, column]).square().sum()
    assert isinstance(total, Tensor)
    return total / len(x)


def masked(x: Tensor, y: Tensor) -> Tensor:
    return (x.square() * (y > 0)).sum() / x.numel()


def of_logits(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y.argmax(-1), reduction="sum") / len(y)


def by_each(x: Tensor, y: Tensor) -> Tensor:
    return ((x - y).abs().sum(-1).sum() / x.shape[0]).mul(3)


MEANS: list[Loss] = [evidence, added_up, masked, of_logits, by_each]


def by_a_constant(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum() / 8


def by_features(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum() / x.shape[1]


def by_what_is_positive(x: Tensor, y: Tensor) -> Tensor:
    """Here all are, in each row."""
    return (x - y).square().sum() / int((y > 0).sum())


def by_rows_that_count(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum() / sum(bool(row.any()) for row in y > 0)


def by_distinct(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum() / len(torch.unique(y[:, 0]))


def of_picked(x: Tensor, y: Tensor) -> Tensor:
    picked = x[y[:, 0] > 0]
    return picked.square().sum() / len(picked)


def written_to(x: Tensor, y: Tensor) -> Tensor:
    total = (x - y).square().sum()
    total += x.square().mean() * y.square().sum()
    return total / len(x)


OTHERS: list[Loss] = [
    *(by_a_constant, by_features, by_what_is_positive, by_rows_that_count, by_distinct),
    *(of_picked, written_to),
]


class OfLengths(nn.Module):
    """Is told how many elements of each row count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        return self.layer(x).square().sum() / sum(lengths)


def _regions(loss: Loss) -> set[str]:
    torch.manual_seed(0)
    x, y = (torch.rand(8, 6, dtype=torch.float64) + 0.1 for _ in range(2))
    found, _ = RowGuard(Trained(loss).double(), lambda mine: [mine]).coupling(
        Trained(loss).double(), (x, y), {}
    )
    return {*found.regions}


@pytest.mark.parametrize("loss", MEANS)
def test_a_sum_divided_by_rows_is_a_mean_over_rows(loss: Loss) -> None:
    assert not _regions(loss)


@pytest.mark.parametrize("loss", OTHERS)
def test_a_sum_divided_by_what_values_may_say_is_none(loss: Loss) -> None:
    assert _regions(loss)


def test_a_sum_divided_by_numbers_of_the_call_is_none() -> None:
    model = OfLengths().double()
    guard = RowGuard(model, lambda mine: [mine])
    found, _ = guard.coupling(model, (torch.rand(8, 6).double(), [6] * 8), {})
    assert found.regions
