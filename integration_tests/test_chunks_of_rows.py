"""Models that cut a batch into chunks of some rows, in each of which the rows meet."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, TP
from .programs import DATA, WIDTH, Block, Run, right

Batch = Mapping[str, Tensor]


class GhostNorm(nn.Module):
    """Normalizes over virtual batches."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(math.ceil(len(x) / self.rows))
        return torch.cat([self.norm(chunk) for chunk in chunks])


class Split(GhostNorm):
    """Does it with as many rows in each but the last one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(rows) for rows in x.split(self.rows)])


class Slices(GhostNorm):
    """Keeps the latest rows at hand of a loop that is as long as the batch."""

    def forward(self, x: Tensor) -> Tensor:
        made = [self.norm(x[max(i - self.rows, 0) : i + self.rows]) for i in range(0, len(x), 2)]
        return torch.cat([each[:2] for each in made])[: len(x)]


class Chunked(nn.Module):
    def __init__(self, norm: nn.Module, *, is_first_normed: bool) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(WIDTH) if is_first_normed else nn.Identity()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        x = self.first(batch["x"])
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x), batch["y"])


def trained(kind: type[GhostNorm], rows: int, run: Run) -> None:
    model = Chunked(kind(rows), is_first_normed=rows == 4)
    run.train(model)
    for buffer in model.buffers():
        run.keep(buffer)


CASES = [(GhostNorm, 2), (GhostNorm, 3), (GhostNorm, 4), (GhostNorm, 8), (Split, 4), (Slices, 4)]


@pytest.mark.slow
@pytest.mark.by_day("dp-*", "zero3-GhostNorm-4")
@pytest.mark.parametrize(("kind", "rows"), CASES)
@pytest.mark.parametrize("plan", DATA)
def test_chunks_are_those_of_the_rows_of_all_ranks(
    world2: World, plan: str, kind: type[GhostNorm], rows: int
) -> None:
    right(world2, functools.partial(trained, kind, rows), DATA[plan])


@pytest.mark.slow
@pytest.mark.by_day("GhostNorm-4")
@pytest.mark.parametrize(("kind", "rows"), CASES)
def test_so_they_are_beside_tensor_parallel_layers(
    world4: World, kind: type[GhostNorm], rows: int
) -> None:
    right(world4, functools.partial(trained, kind, rows), {DP: 2, TP: 2})


@pytest.mark.slow
@pytest.mark.by_day("GhostNorm-3")
@pytest.mark.parametrize(("kind", "rows"), CASES)
def test_so_they_are_of_four_ranks(world4: World, kind: type[GhostNorm], rows: int) -> None:
    right(world4, functools.partial(trained, kind, rows), {DP: 4})
