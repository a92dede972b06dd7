"""A batch comes as a list of columns, each a dict of tensors, with as many rows as columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PP, TP, ZERO, Constraints
from .programs import WIDTH, Block, Program, Run, right, rows

pytestmark = pytest.mark.slow
STAGES: Constraints = {
    PP: 2,
    "pipeline_parallel.block_calls": [f"embedding.blocks.{i}" for i in (0, 1, 0, 1)],
}
Columns = list[dict[str, Tensor]]


class Embedding(nn.Module):
    """Returns a vector for every row of a column."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, column: dict[str, Tensor]) -> Tensor:
        x = column["x"]
        for block in self.blocks:
            x = block(x)
        return F.normalize(x * column["weight"][:, None], dim=-1)


class Contrast(nn.Module):
    """Scores every row of the first column with all rows of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()

    def forward(self, features: Columns, labels: Tensor) -> Tensor:
        first, *others = [self.embedding(column) for column in features]
        scores = 5.0 * first @ torch.cat(others).T
        losses = F.cross_entropy(scores, torch.arange(len(first)), reduction="none")
        return (losses * labels).mean()


class Distance(Contrast):
    """Compares the two columns of a row."""

    def forward(self, features: Columns, labels: Tensor) -> Tensor:
        first, second = (self.embedding(column) for column in features)
        return F.mse_loss((first * second).sum(-1), labels)


class Boxes(nn.Module):
    """Gives the targets of a picture, as many as it has, one score each."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.block = norm, Block()

    def forward(self, images: Tensor, targets: Columns) -> Tensor:
        results = self.block(self.norm(images))
        losses = [
            (target["boxes"] @ row - target["weight"]).square().mean()
            for row, target in zip(results, targets, strict=True)
        ]
        return torch.stack(losses).mean()


class Views(nn.Module):
    """Normalizes each view over its rows, and does not say whether there is one a row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.BatchNorm1d(WIDTH, track_running_stats=False), Block()

    def forward(self, views: Columns) -> Tensor:
        losses = [self.block(self.norm(view["x"])).square().mean() for view in views]
        return torch.stack(losses).mean()


def _train(run: Run, model: nn.Module) -> None:
    model, optimizer = run.start(model)
    for batch in rows():
        # Two rows a rank, or two rows of one device, and two columns.
        few = {name: x[:4] for name, x in batch.items()}
        weight = few["x"][:, 0].sigmoid() + 0.5
        own = run.part({**few, "weight": weight, "labels": few["y"][:, 1].sigmoid()})
        columns = [{"x": own[name], "weight": own["weight"]} for name in ("x", "y")]
        loss = model(columns, own["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def contrast(run: Run) -> None:
    _train(run, Contrast())


def distance(run: Run) -> None:
    _train(run, Distance())


def _unclear() -> None:
    run = Run({DP: 2})
    model, _ = run.start(Views())
    own = run.part({name: x[:4] for name, x in rows()[0].items()})
    with pytest.raises(ValueError, match="what a list of dicts or tuples holds"):
        model([{"x": own["x"]}, {"x": own["y"]}])


def boxes(run: Run, norm: Callable[[int], nn.Module], count: int) -> None:
    """Give every picture as many targets: the list has something for every row."""
    model, optimizer = run.start(Boxes(norm(WIDTH)))
    for batch in rows():
        own = run.part({name: x[:4] for name, x in batch.items()})
        targets: Columns = []
        for row in own["y"]:
            each = torch.stack([row.roll(i) for i in range(count)])
            targets.append({"boxes": each, "weight": each[:, 0]})
        loss = model(own["x"], targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


@pytest.mark.by_day(
    "contrast-plan3", "distance-plan0", "distance-plan1", "distance-plan2", "distance-plan3"
)
@pytest.mark.parametrize("plan", [{DP: 2}, {DP: 2, ZERO: 3}, {TP: 2}, STAGES])
@pytest.mark.parametrize("program", [contrast, distance])
def test_a_list_of_as_many_columns_as_rows_holds_columns(
    world2: World, program: Program, plan: Constraints
) -> None:
    right(world2, program, plan)


@pytest.mark.by_day("2-LayerNorm", "3-LayerNorm", "3-BatchNorm1d")
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("count", [2, 3])  # as many as rows, and a number that most tensors share
def test_a_list_of_targets_of_pictures_holds_one_a_row(
    world2: World, norm: Callable[[int], nn.Module], count: int
) -> None:
    right(world2, partial(boxes, norm=norm, count=count), {DP: 2, ZERO: 3})


def test_a_list_of_what_may_be_columns_or_one_a_row_is_refused(world2: World) -> None:
    world2.run(_unclear)
