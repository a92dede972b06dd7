"""Tensors that are as long as the batch has rows, and have none: masks, tables, weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PARTS, PP, ZERO, Constraints
from .programs import WIDTH, Block, Run, both, right
from .test_bad_input import check


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        return x + self.out((q @ k.mT + mask).softmax(-1) @ v)


class Masked(nn.Module):
    """Attention over as many steps as there are rows, with a mask of (time x time)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, shared: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, shared)
        return F.mse_loss(x, y)


class Classified(nn.Module):
    """A body with or without a batch norm, and a loss of features and a table of all classes."""

    def __init__(self, loss: Any, *, is_normed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH) if is_normed else nn.Identity()
        self.loss = loss

    def forward(self, x: Tensor, shared: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.loss(self.norm(x), shared, y)


def weighed(x: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x[:, : len(weights)], y, weights)


def nearest(x: Tensor, prototypes: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(-torch.cdist(x, prototypes), y)


def placed(x: Tensor, anchors: Tensor, y: Tensor) -> Tensor:
    wanted = y.to(x.dtype)[:, None, None].expand(-1, *anchors.shape)
    return F.mse_loss(x.unsqueeze(1) * anchors, wanted)


def train(run: Run, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    model, optimizer = run.start(model)
    for x, shared, y in batches:
        part = run.part({"x": x, "y": y})
        loss = model(part["x"], shared, part["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def masked(run: Run, rows: int, length: int) -> None:
    mask = torch.full((length, length), -1e9).double().triu(1)
    x, y = torch.randn(2, 3, rows, length, WIDTH, dtype=torch.float64)
    train(run, Masked(), [(x[i], mask, y[i]) for i in range(3)])


def classified(run: Run, rows: int, classes: int, loss: Any, *, is_normed: bool = False) -> None:
    shared = torch.rand(classes, dtype=torch.float64) + 0.5
    if loss is not weighed:
        shared = torch.randn(classes, WIDTH, dtype=torch.float64)
    x, y = torch.randn(3, rows, WIDTH, dtype=torch.float64), torch.arange(rows) % classes
    train(run, Classified(loss, is_normed=is_normed), [(each, shared, y) for each in x])


class TimeFirst(nn.Module):
    """Attention over time, which is the first dim, as of torch's own layers."""

    def __init__(self, *, is_pooled: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
        self.is_pooled = is_pooled

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layer(x)
        return F.cross_entropy((x.mean(0) if self.is_pooled else x).flatten(0, -2), y.flatten())


def time_first(run: Run, rows: int, length: int, *, is_pooled: bool) -> None:
    model, optimizer = run.start(TimeFirst(is_pooled=is_pooled))
    for x in torch.randn(3, length, rows, WIDTH, dtype=torch.float64):
        y = torch.arange(rows) % 3
        part = run.part({"x": x.transpose(0, 1), "y": y})
        wanted = part["y"] if is_pooled else part["y"].expand(length, -1)
        loss = model(part["x"].transpose(0, 1), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


DATA, PIPELINE = {DP: 2}, {PP: 2, PARTS: 2}


@pytest.mark.by_day("program1-plan1", "program7-plan7", "program9-plan9")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plan"),
    [
        (partial(masked, rows=2, length=2), PIPELINE),
        (partial(masked, rows=4, length=4), DATA),
        (partial(masked, rows=8, length=4), DATA),
        (partial(masked, rows=8, length=4), PIPELINE),
        (partial(classified, rows=4, classes=4, loss=weighed), PIPELINE),
        (partial(classified, rows=6, classes=3, loss=weighed, is_normed=True), DATA),
        (partial(classified, rows=8, classes=4, loss=nearest), DATA),
        (partial(classified, rows=6, classes=3, loss=nearest), {DP: 2, ZERO: 3}),
        (partial(classified, rows=4, classes=4, loss=nearest), PIPELINE),
        (partial(classified, rows=8, classes=4, loss=placed), DATA),
        (partial(time_first, rows=8, length=4, is_pooled=True), DATA),
    ],
)
def test_what_is_as_long_as_the_batch_need_not_have_rows(
    world2: World, program: Any, plan: Constraints
) -> None:
    right(world2, program, plan)


@pytest.mark.slow
def test_a_mask_as_long_as_the_part_of_a_rank_has_no_rows(world4: World) -> None:
    right(world4, partial(masked, rows=4, length=2), {PP: 2, PARTS: 2, DP: 2, ZERO: 3})


@pytest.mark.slow
def test_as_many_steps_as_rows_are_refused_where_nothing_tells_them_apart(world2: World) -> None:
    program = partial(time_first, rows=8, length=4, is_pooled=False)
    check(world2, ValueError, "since the first two are as long", both, program, DATA)
