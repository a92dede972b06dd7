"""What the check of rows finds of losses that are divided by sums over all rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.borders import RowCoupling
from vescale_parallel._cross_replica.call_guard import RowGuard

Loss = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.layer(x).tanh()
        return x if mask is None else x * masked(x, mask)


class Trained(nn.Module):
    def __init__(self, loss: Loss, *, num_blocks: int = 2, in_blocks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.loss, self.in_blocks = loss, in_blocks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask if self.in_blocks else None)
        return self.loss(x, mask)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return (x.square() * mask).sum() / mask.sum()


def weighted(x: Tensor, mask: Tensor) -> Tensor:
    return (x.square() * (mask / mask.sum().clamp(min=1))).sum()


def picked(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask > 0].square().mean()


def columns(x: Tensor, mask: Tensor) -> Tensor:
    return (x.square() * mask).sum() / (mask > 0).any(0).sum()


def squared(x: Tensor, mask: Tensor) -> Tensor:
    return masked(x, mask).square()


def by_a_number(x: Tensor, mask: Tensor) -> Tensor:
    return (x.square() * mask).sum() / float(mask.sum())


def if_some_count(x: Tensor, mask: Tensor) -> Tensor:
    return masked(x, mask) if mask[:, 0].sum() > 0 else x.square().mean()


def found(model: nn.Module) -> RowCoupling:
    torch.manual_seed(0)
    guard = RowGuard(model.double(), lambda own: [own])
    # All count at first.
    with torch.enable_grad():
        return guard.coupling(model, (torch.randn(8, 6).double(), torch.ones(8, 6).double()), {})[
            0
        ]


@pytest.mark.parametrize("loss", [masked, weighted, picked])
def test_sums_of_all_parts_divide(loss: Loss) -> None:
    coupling = found(Trained(loss))
    assert coupling.regions
    assert coupling.apart is not None
    assert not coupling.apart.regions
    assert coupling.apart.ratios
    assert all(coupling.apart.ratios)


@pytest.mark.parametrize("loss", [columns, squared, by_a_number, if_some_count])
def test_what_is_not_linear_in_sums_needs_all_rows(loss: Loss) -> None:
    coupling = found(Trained(loss))
    assert coupling.regions
    assert coupling.apart is None or coupling.apart.regions


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_sums_in_blocks_are_not_counted(num_blocks: int) -> None:
    """Nothing sees them there while a model trains."""
    coupling = found(Trained(masked, num_blocks=num_blocks, in_blocks=True))
    assert coupling.apart is not None
    assert {*coupling.apart.regions} == {f"blocks.{index}" for index in range(num_blocks)}


def test_a_mean_over_rows_is_not_looked_at_again() -> None:
    coupling = found(Trained(lambda x, mask: (x * mask).square().mean() / 2))
    assert not coupling.regions
    assert coupling.apart is None
