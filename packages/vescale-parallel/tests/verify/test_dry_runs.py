"""What is seen of a dry run is seen once, also that it ends in an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._verify.dry_runs import DryRuns

PAIR = {"block.up.weight": "Shard(0)", "block.down.weight": "Shard(1)"}


class Block(nn.Module):
    """A pair of layers, and between them a view that has the width of one device."""

    def __init__(self, width: int | None, forwards: list[str]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24, bias=False), nn.Linear(24, 12, bias=False)
        self.width = width
        self.note = forwards.append

    def forward(self, x: Tensor) -> Tensor:
        self.note("block")
        hidden = self.up(x)
        return self.down(hidden.view(len(x), self.width or hidden.shape[1]).relu())


class Model(nn.Module):
    def __init__(self, width: int | None, forwards: list[str]) -> None:
        super().__init__()
        self.block = Block(width, forwards)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def test_a_part_that_does_not_run_is_run_once_wherever_its_gradients_are_summed() -> None:
    forwards: list[str] = []
    model = Model(24, forwards)
    runs = DryRuns(model, (torch.zeros(2, 12),))
    runs.blocks()
    forwards.clear()
    for entered in ({}, {"block.<enter>": "Replicate()"}, {}):
        with pytest.raises(DryRunError, match="in module 'block'"):
            runs.part(shard(PAIR | entered, model, 2))
    assert len(forwards) == 1


def test_a_part_is_run_once_wherever_its_gradients_are_summed() -> None:
    forwards: list[str] = []
    model = Model(None, forwards)
    runs = DryRuns(model, (torch.zeros(2, 12),))
    runs.blocks()
    forwards.clear()
    for entered in ({}, {"block.<enter>": "Replicate()"}, {}):
        runs.part(shard(PAIR | entered, model, 2))
    assert len(forwards) == 1


class Attention(nn.Module):
    def __init__(self, forwards: list[str]) -> None:
        super().__init__()
        self.block = nn.MultiheadAttention(12, 4, batch_first=True, bias=False)
        self.note = forwards.append

    def forward(self, x: Tensor) -> Tensor:
        self.note("attention")
        attended, _ = self.block(x, x, x, need_weights=False)
        return attended


def test_an_argument_that_enters_whole_beside_one_in_shards_is_told_apart() -> None:
    cut = {
        "block.in_proj_weight": "InterleavedShard(0, 3)",
        "block.out_proj.weight": "Shard(1)",
        "block.<enter>": "Shard(1)",
    }
    forwards: list[str] = []
    model = Attention(forwards)
    runs = DryRuns(model, (torch.zeros(2, 6, 12),))
    runs.blocks()
    forwards.clear()
    for entered in (
        {},
        {"block.<enter:key>": "Replicate()", "block.<enter:value>": "Replicate()"},
    ):
        runs.part(shard(cut | entered, model, 2))
    assert len(forwards) == 2
