"""Recurrent layers over packed sequences, in models whose rows depend on each other."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vescale_testing import World

from .plans import DP
from .programs import WIDTH, Program, Run, right

ROWS, LENGTH = 4, 4


class Contrasted(nn.Module):
    """Compares what a recurrent layer makes of each sequence with all others of the batch."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.layer = layer(WIDTH, WIDTH, batch_first=True)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, lengths = batch["x"], batch["lengths"]
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, _ = self.layer(packed)
        made, found = pad_packed_sequence(made, batch_first=True, padding_value=0.5)
        rows = F.normalize(made.mean(1) * found[:, None], dim=1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def _batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    # The longest sequence is on one rank.
    lengths = torch.tensor([[4, 2, 3, 1], [1, 2, 2, 4]])
    return [{"x": rows, "lengths": of_rows} for rows, of_rows in zip(x, lengths, strict=True)]


def lstm(run: Run) -> None:
    run.train(Contrasted(nn.LSTM), given=_batches())


def gru(run: Run) -> None:
    run.train(Contrasted(nn.GRU), given=_batches())


@pytest.mark.slow
@pytest.mark.parametrize("program", [lstm, gru])
def test_packed_sequences_are_those_of_all_ranks(world2: World, program: Program) -> None:
    right(world2, program, {DP: 2})
