"""Means over as many rows as code has counted, by values that it has read or was given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from vescale_parallel._cross_replica.call_guard import RowGuard

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
FULL, MIXED = [5] * 8, [3, 4, 2, 2, 5, 5, 2, 4]


class Trained(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), lengths, y)


def packed(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    both = [
        pack_padded_sequence(each, lengths, batch_first=True, enforce_sorted=False)
        for each in (x, y)
    ]
    return F.mse_loss(both[0].data, both[1].data)


def stacked(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    rows = zip(x, y, lengths.tolist(), strict=False)
    return torch.stack([F.mse_loss(a, b) for a, b, n in rows if n != 1]).mean()


def long_ones(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    rows = zip(x, y, lengths.tolist(), strict=False)
    return torch.stack([F.mse_loss(a[:n], b[:n]) for a, b, n in rows if n > 2]).mean()


def added_up(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    some = [F.mse_loss(a, b) for a, b, n in zip(x, y, lengths, strict=False) if int(n) != 1]
    return torch.stack([sum(some, torch.zeros(()))]).sum() / len(some)


def averaged(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    some = [F.mse_loss(a, b) for a, b, n in zip(x, y, lengths, strict=False) if n.item() != 1]
    total = some[0]
    for each in some[1:]:
        total = total + each
    return total / len(some)


COUNTED: list[Loss] = [packed, stacked, long_ones, added_up, averaged]


class OfLists(nn.Module):
    """Is given a plain number for each row."""

    def __init__(self, loss: Callable[[Tensor, list[int], Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor, lengths: list[int], y: Tensor) -> Tensor:
        return self.loss(self.layer(x), lengths, y)


def of_kept(x: Tensor, lengths: list[int], y: Tensor) -> Tensor:
    return torch.stack(
        [F.mse_loss(a, b) for a, b, n in zip(x, y, lengths, strict=False) if n != 1]
    ).mean()


def of_longest(x: Tensor, lengths: list[int], y: Tensor) -> Tensor:
    return (x[:, : max(lengths)] - y[:, : max(lengths)]).square().mean()


@pytest.mark.parametrize("lengths", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("loss", [of_kept, of_longest])
def test_numbers_of_rows_in_a_list_may_decide_what_a_mean_is_over(
    loss: Callable[[Tensor, list[int], Tensor], Tensor], lengths: list[int]
) -> None:
    x, y = (torch.randn(8, 5, 4, dtype=torch.float64) for _ in range(2))
    model = OfLists(loss).double()
    guard = RowGuard(model, lambda mine: [mine])
    guard.is_rows_first = lambda tree: True  # of no other dim
    assert guard.coupling(model, (x, lengths, y), {})[0].regions


def stack_of_all(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(a, b) for a, b in zip(x, y, strict=True)]).mean()


class Normalized(Trained):
    """Is compared within, by what its norm is given."""

    def __init__(self) -> None:
        super().__init__(stack_of_all)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.norm(x), lengths, y)


def test_what_a_check_reads_is_not_read_by_code() -> None:
    x, y = (torch.randn(8, 5, 4, dtype=torch.float64) for _ in range(2))
    model = Normalized().double()
    guard = RowGuard(model, lambda mine: [mine])
    assert {*guard.coupling(model, (x, torch.tensor(MIXED), y), {})[0].regions} == {"norm"}


def average_of_all(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    total, some = torch.zeros(()), [F.mse_loss(a, b) for a, b in zip(x, y, strict=True)]
    total = some[0]
    for each in some[1:]:
        total = total + each
    return total / len(some)


def weighted_after_a_look(x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    weight = 0.5 if bool((lengths > 0).all()) else 0.25
    return weight * F.mse_loss(x, y) + torch.stack([x.mean(), x.square().mean()]).mean() * 0.1


def _regions(loss: Loss, lengths: list[int]) -> set[str]:
    torch.manual_seed(0)
    x, y = (torch.randn(8, 5, 4, dtype=torch.float64) for _ in range(2))
    model = Trained(loss).double()
    guard = RowGuard(model, lambda mine: [mine])
    return {*guard.coupling(model, (x, torch.tensor(lengths), y), {})[0].regions}


@pytest.mark.parametrize("lengths", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("loss", COUNTED)
def test_a_mean_over_rows_that_code_counts_is_no_plain_one(loss: Loss, lengths: list[int]) -> None:
    assert _regions(loss, lengths)


@pytest.mark.parametrize("loss", [stack_of_all, average_of_all, weighted_after_a_look])
def test_a_mean_over_all_rows_is_one(loss: Loss) -> None:
    assert not _regions(loss, MIXED)
