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

from .programs import DATA, WIDTH as BLOCK_WIDTH, Block, Run, right

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


class Detector(nn.Module):
    """Weighs what is there by how often it is, in classes or pixels that mostly are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, is_there = batch["x"], (batch["there"] != 0).double()
        for block in self.blocks:
            x = block(x)
        ratio = (1 - is_there).sum() / is_there.sum().clamp(min=1)
        return F.binary_cross_entropy_with_logits(x, is_there, pos_weight=ratio)


def detected(dtype: torch.dtype, run: Run) -> None:
    generator = torch.Generator().manual_seed(1)

    def batch(*, is_empty: bool) -> dict[str, Tensor]:
        x = torch.randn(ROWS, BLOCK_WIDTH, generator=generator, dtype=torch.float64)
        chances = torch.rand(ROWS, BLOCK_WIDTH, generator=generator)
        there = chances ** torch.arange(1, ROWS + 1)[:, None]
        return {"x": x, "there": ((there > 0.5) & (not is_empty)).to(dtype)}

    run.train(Detector(), given=[batch(is_empty=True), *(batch(is_empty=False) for _ in range(2))])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=["float", "int"])
def test_labels_of_which_the_first_batch_has_none_are_counted_later(
    world2: World, dtype: torch.dtype, plan: str
) -> None:
    right(world2, functools.partial(detected, dtype), DATA[plan])
