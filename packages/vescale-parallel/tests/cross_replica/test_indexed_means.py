"""Means over what is indexed: over as many elements as shapes say, or as there are of a value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._cross_replica.call_guard import RowGuard

Index = Callable[[Tensor, Tensor], Tensor]


class Indexed(nn.Module):
    """Has a loss of some elements of what it makes of rows."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(5, 6), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x), x)


def pairs(made: Tensor, x: Tensor) -> Tensor:
    first, second = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])
    return F.mse_loss(made[:, first] * made[:, second], x[:, :3])


def last(made: Tensor, x: Tensor) -> Tensor:
    """One element of every row, as heads of classifiers take the last token's."""
    return F.mse_loss(made[torch.arange(len(x)), (x[:, :3] > 0.5).long().sum(1)], x[:, 0])


def last_kept(made: Tensor, x: Tensor) -> Tensor:
    """As transformers takes it, of positions made behind a look at whether anything is masked."""
    mask = x > 0.2
    if bool(mask.all()):
        mask = torch.ones_like(mask)
    positions = torch.arange(x.shape[1])
    at = (positions * mask).argmax(-1)
    return F.mse_loss(made[torch.arange(len(x)), at], x[:, 0])


def selected(made: Tensor, x: Tensor) -> Tensor:
    return made.index_select(1, torch.tensor([4, 1])).square().mean()


def masked(made: Tensor, x: Tensor) -> Tensor:
    mask = x[:, 0] > 0.5
    return F.mse_loss(made[mask, 0], x[mask, 0])


def nonzero(made: Tensor, x: Tensor) -> Tensor:
    rows = (x[:, 0] > 0.5).nonzero().squeeze(1)
    return F.mse_loss(made[rows, 0], x[rows, 0])


def where(made: Tensor, x: Tensor) -> Tensor:
    (rows,) = torch.where(x[:, 0] > 0.5)
    return made.index_select(0, rows + 0).square().mean()


def ordered(made: Tensor, x: Tensor) -> Tensor:
    """Of as many numbers as a mask has picked before."""
    return made[:, x[x > 0.3].argsort() % 5].square().mean()


def listed(made: Tensor, x: Tensor) -> Tensor:
    rows = [row for row, value in enumerate((x[:, 0] > 0.5).tolist()) if value]
    return made[rows].square().mean()


def booleans(made: Tensor, x: Tensor) -> Tensor:
    return made[[bool(value) for value in x[:, 0] > 0.5]].square().mean()


def made_of_list(made: Tensor, x: Tensor) -> Tensor:
    rows = [row for row, value in enumerate((x[:, 0] > 0.5).tolist()) if value]
    return made[torch.tensor(rows)].square().mean()


def boxes(made: Tensor, x: Tensor) -> Tensor:
    """Of rows that numbers say, of which other ranks may have more."""
    rows = (x[:, 0] * len(x)).long()
    return made[rows, 2].square().mean()


def boxes_behind(made: Tensor, x: Tensor) -> Tensor:
    return made[:, 2][..., (x[:, 0] * len(x)).long()].square().mean()


def boxes_by_name(made: Tensor, x: Tensor) -> Tensor:
    return made.index_select(dim=0, index=(x[:, 0] * len(x)).long()).square().mean()


def boxes_half_by_name(made: Tensor, x: Tensor) -> Tensor:
    return made.index_select(0, index=(x[:, 0] * len(x)).long()).square().mean()


def repeated(made: Tensor, x: Tensor) -> Tensor:
    rows = torch.arange(len(x)).repeat_interleave((x[:, 0] > 0.5).long())
    return made[rows].square().mean()


def joined(made: Tensor, x: Tensor) -> Tensor:
    """Nobody is above 2, of which the lengths tell nothing."""
    rows = torch.cat([torch.arange(len(x)), (x[:, 0] > 2).nonzero().squeeze(1)])
    return made[rows].square().mean()


def counted(made: Tensor, x: Tensor) -> Tensor:
    return made[torch.arange(int((x[:, 0] > 0.5).sum()))].square().mean()


def array(made: Tensor, x: Tensor) -> Tensor:
    return made[(x[:, 0] > 0.5).numpy().nonzero()[0]].square().mean()


class Looked(nn.Module):
    """Looks up rows of a parameter, as an embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[(x[:, 0] * 9).long()].square().mean()


class Propagated(Looked):
    """Looks up rows of what a graph between them has made of all, as LightGCN does."""

    def __init__(self) -> None:
        super().__init__()
        self.edges: Tensor
        self.register_buffer("edges", (torch.rand(9, 9) > 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        table = (self.edges @ self.table + self.table) / 2
        first, second = table[(x[:, 0] * 9).long()], table[(x[:, 1] * 9).long()]
        return -F.logsigmoid((first * second).sum(-1)).mean()


@pytest.mark.parametrize("make", [Looked, Propagated])
def test_rows_of_what_has_no_rows_are_as_many_as_numbers(make: type[Looked]) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.rand(8, 5, dtype=torch.float64)
    found, _ = RowGuard(model, lambda mine: [mine]).coupling(model, (x,), {})
    assert not found.regions


def regions(loss: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    torch.manual_seed(0)
    model, x = Indexed(loss).double(), torch.rand(8, 5, dtype=torch.float64)
    found, _ = RowGuard(model, lambda mine: [mine]).coupling(model, (x,), {})
    return [*found.regions]


@pytest.mark.parametrize("loss", [pairs, last, last_kept, selected])
def test_a_mean_over_what_shapes_say_is_one_over_rows(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert not regions(loss)


@pytest.mark.parametrize(
    "loss",
    [
        *(masked, nonzero, where, ordered, listed, booleans, made_of_list),
        *(
            boxes,
            boxes_behind,
            boxes_by_name,
            boxes_half_by_name,
            repeated,
            joined,
            counted,
            array,
        ),
    ],
)
def test_a_mean_over_what_values_say_is_none(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert regions(loss)
