"""Losses over the rows that Python has picked, and over packed sequences, are one device's."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from vescale_testing import World

from .programs import DATA, Run, right

ROWS, TOKENS, WIDTH = 8, 5, 4
# All rows of the first batch are full: nothing is to be seen there.
LENGTHS = [5] * 8, [5, 3, 2, 5, 1, 4, 1, 1], [2, 3, 1, 1, 4, 4, 3, 1]


class Sequences(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, y, lengths = batch["x"], batch["y"], batch["lengths"]
        for block in self.blocks:
            x = x + block(x).tanh()
        if self.loss == "packed":
            pack = functools.partial(
                pack_padded_sequence, lengths=lengths, batch_first=True, enforce_sorted=False
            )
            return F.mse_loss(self.rnn(pack(x))[0].data, pack(y).data)
        rows = list(zip(self.rnn(x)[0], y, lengths.tolist(), strict=True))
        losses = [F.mse_loss(a[:n], b[:n]) for a, b, n in rows if n > 2]
        if self.loss == "stacked":
            return torch.stack(losses).mean()
        total = losses[0]
        for each in losses[1:]:
            total = total + each
        return total / len(losses)


def trained(loss: str, run: Run) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS, TOKENS, WIDTH)
    given = [
        {
            "x": torch.randn(shape, generator=generator, dtype=torch.float64),
            "y": torch.randn(shape, generator=generator, dtype=torch.float64),
            "lengths": torch.tensor(lengths),
        }
        for lengths in LENGTHS
    ]
    run.train(Sequences(loss), given=given)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
@pytest.mark.parametrize("loss", ["packed", "stacked", "averaged"])
def test_rows_that_were_all_full_at_first_are_counted_later(
    world2: World, loss: str, plan: str
) -> None:
    right(world2, functools.partial(trained, loss), DATA[plan])
