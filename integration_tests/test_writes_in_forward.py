"""Parameters that forward writes to itself are one device's, or the write is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .programs import DATA, PIPELINE, TENSOR, WIDTH, Plain, Run, right, rows
from .test_bad_input import check

STAGES: dict[str, Constraints] = {**DATA, "zero1": {DP: 2, ZERO: 1}}
ROWS, TOKENS = 8, 6


class Writing(nn.Module):
    """A block whose forward writes to its parameters, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        match self.kind:
            case "clamped":
                with torch.no_grad():
                    self.scale.clamp_(0.6, 1.1)
            case "clamped_data":
                self.scale.data.clamp_(0.6, 1.1)
            case "new_data":
                self.scale.data = self.scale.data.clamp(0.6, 1.1)
            case "teacher":  # averages another weight, as momentum encoders do
                with torch.no_grad():
                    self.frozen.data = self.frozen.data * 0.9 + self.layer.weight.data[0] * 0.1
            case "of_rows":
                with torch.no_grad():
                    self.scale.add_(y.mean(0), alpha=0.1)
            case "codebook":  # of rows too, and read by the next step only
                y = y + self.frozen
                self.frozen.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            case _:
                raise ValueError(self.kind)
        return x + y * self.scale * self.frozen


class Written(Plain):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writing(kind) for _ in range(3))


KINDS = ["clamped", "clamped_data", "new_data", "teacher", "of_rows", "codebook"]


def written(kind: str, run: Run) -> None:
    run.train(Written(kind))


def _cases(names: Iterable[str]) -> list[Any]:
    """Return all names with all stages, but few of them for every day."""
    return [
        pytest.param(name, stage, marks=() if stage == "zero3" else pytest.mark.nightly)
        for name in names
        for stage in STAGES
    ]


@pytest.mark.by_day("clamped-zero3")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [*_cases(KINDS)])
def test_what_forward_writes_stays(world2: World, kind: str, stage: str) -> None:
    right(world2, functools.partial(written, kind), STAGES[stage])


class Words(nn.Module):
    """Embeds words by a table that limits the norm of its rows, or gives sparse gradients."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.table = table

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.table(batch["words"])
        for block in self.blocks:
            x = x + block(x).tanh()
        return (x.mean(tuple(range(1, x.dim()))) - batch["y"]).square().mean()


TABLES = {
    "embedding": functools.partial(nn.Embedding, 9, WIDTH, max_norm=1.5),
    "bag": functools.partial(nn.EmbeddingBag, 9, WIDTH, max_norm=1.5, norm_type=1.0),
    "sparse": functools.partial(nn.Embedding, 9, WIDTH, sparse=True),
}


def words(table: str, run: Run) -> None:
    generator = torch.Generator().manual_seed(2)
    given = [
        {
            "words": torch.randint(9, (ROWS, TOKENS), generator=generator),
            "y": torch.randn(ROWS, generator=generator).double(),
        }
        for _ in range(3)
    ]
    run.train(Words(TABLES[table]()), given=given)


@pytest.mark.by_day("bag-zero3")
@pytest.mark.slow
@pytest.mark.parametrize(("table", "stage"), _cases(TABLES))
def test_tables_that_write_norms_or_have_sparse_gradients(
    world2: World, table: str, stage: str
) -> None:
    right(world2, functools.partial(words, table), STAGES[stage])


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraints", [TENSOR, {**PIPELINE, "pipeline_parallel.head_modules": ("table",)}]
)
def test_sparse_gradients_that_no_other_rank_adds_to(
    world2: World, constraints: Constraints
) -> None:
    right(world2, functools.partial(words, "sparse"), constraints)


class BufferData(nn.Module):
    """A block that gives its buffer another ``.data``."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) - self.mean
        self.mean.data = self.mean.data * 0.9 + y.detach().mean(0) * 0.1
        return x + y


def buffer_data(run: Run) -> None:
    model = Plain()
    model.blocks = nn.ModuleList(BufferData() for _ in range(2))
    run.train(model)


@pytest.mark.slow
def test_a_buffer_may_be_given_other_data(world2: World) -> None:
    right(world2, buffer_data, DATA["dp"])


def call(kind: str, constraints: Constraints) -> None:
    model: Any = vescale.parallelize(make_plan(constraints), Written(kind).double())
    run = Run(constraints)
    model(run.part(rows()[0]))


@pytest.mark.by_day("clamped-constraints0-a pipeline runs it several times")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "constraints", "message"),
    [
        ("clamped", {PP: 2, PARTS: 2}, "a pipeline runs it several times"),
        ("codebook", {DP: 2, "batch.gradient_accumulation": 2}, "runs it several times a step"),
        ("new_data", {DP: 2, "recompute": "full"}, "'blocks.0.scale', and recompute"),
        ("clamped", {TP: 2, "recompute": "full"}, "'blocks.0.scale', and recompute"),
        ("clamped", {DP: 2, "precision.param": "bfloat16"}, "'blocks.0.scale', which computes in"),
    ],
)
def test_writes_that_would_be_made_twice_or_lost_are_refused(
    world2: World, kind: str, constraints: Constraints, message: str
) -> None:
    check(world2, ValueError, message, call, kind, constraints)
    world2.close()
