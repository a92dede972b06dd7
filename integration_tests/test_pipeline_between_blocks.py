"""Modules that are called between the blocks of a pipeline: one device's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .plans import DP, PARTS, PP, ZERO, Constraints
from .programs import PIPELINE, WIDTH, Block, Program, Run, right, rows
from .short_group import in_short_group
from .test_bad_input import check

BEHIND = "pipeline_parallel.called_behind"


class Auxiliary(nn.Module):
    """Has a loss of its own behind block ``at``."""

    def __init__(self, loss: str, at: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.aux = nn.Linear(WIDTH, WIDTH)
        self.loss, self.at = loss, at

    def loss_of(self, found: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        if self.loss == "mse":
            return F.mse_loss(found, batch["y"])
        # Another number of targets in every micro-batch.
        target = batch["y"].argmax(-1)
        return F.cross_entropy(found, target.masked_fill(target > 5, -100))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, aux = self.embed(batch["x"]), batch["x"].new_zeros(())
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.at:
                aux = self.loss_of(self.aux(x), batch)
        return self.loss_of(self.head(x), batch) + 0.3 * aux


class Normed(nn.Module):
    """One norm, behind every second block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index % 2 == 0:
                x = self.norm(x)
        return F.mse_loss(self.head(x), batch["y"])


class Borrowing(nn.Module):
    """A block that is given a module, and a method of it, to call."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, lent: nn.Module, scale: Callable[[Tensor], Tensor]) -> Tensor:
        return scale(self.block(x)) + lent(x) - 0.5 * lent(x.tanh())


class Lent(nn.Linear):
    def scaled(self, x: Tensor) -> Tensor:
        return 0.5 * x


class Lending(nn.Module):
    """One module that all blocks are given, and call twice; one result crosses a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lent = nn.Linear(WIDTH, WIDTH), Lent(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Borrowing() for _ in range(4))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        skipped = x
        for index, block in enumerate(self.blocks):
            x = block(x, self.lent, self.lent.scaled)
            skipped = self.lent(x) if index == 0 else skipped
        return F.mse_loss(x + skipped, batch["y"])


class Half(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        x = self.embed(x) + before
        for block in self.blocks:
            x = block(x)
        return x


class OfHalves(nn.Module):
    """One module of three names, called before all blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Half(self.shared), Half(self.shared)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.first(batch["x"], batch["x"])
        return F.mse_loss(self.head(self.second(batch["x"], x)), batch["y"])


def auxiliary(run: Run, *, loss: str, at: int) -> None:
    run.train(Auxiliary(loss, at))


def normed(run: Run) -> None:
    run.train(Normed())


def planned(run: Run, *, model: type[nn.Module], options: tuple[Any, ...]) -> None:
    """The planner sees from an example what is called between which blocks."""
    made = model(*options)
    if run.constraints is not None:
        plan = vescale.generate_plan(
            made.double(), {**run.constraints, "batch.global_size": 8}, example_batch=(rows(1)[0],)
        )
        found = plan.pipeline_parallel.called_behind
        assert vescale.ParallelPlan.from_json(plan.to_json()) == plan
        assert f"{BEHIND}: " in str(plan)
        run = Run({**run.constraints, BEHIND: found}, run.results)
    run.train(made)


SAID = {BEHIND: {"aux": ["blocks.1"]}}
TWICE = {BEHIND: {"norm": ["blocks.0", "blocks.2"]}}
INTERLEAVED = {
    PP: 2,
    PARTS: 2,
    "pipeline_parallel.schedule": "interleaved_1f1b",
    "pipeline_parallel.virtual_stages": 2,
}
PROGRAMS: dict[str, tuple[Program, Constraints]] = {
    "auxiliary": (functools.partial(auxiliary, loss="mse", at=1), {**PIPELINE, **SAID}),
    "auxiliary of targets": (functools.partial(auxiliary, loss="ce", at=1), {**PIPELINE, **SAID}),
    "of four stages": (functools.partial(auxiliary, loss="ce", at=1), {**INTERLEAVED, **SAID}),
    "twice": (normed, {**PIPELINE, **TWICE}),
    "planned": (
        functools.partial(planned, model=Auxiliary, options=("ce", 0)),
        PIPELINE,
    ),
    "planned, lent": (functools.partial(planned, model=Lending, options=()), PIPELINE),
    "planned twice": (functools.partial(planned, model=Normed, options=()), PIPELINE),
    "planned, of several names": (
        functools.partial(planned, model=OfHalves, options=()),
        PIPELINE,
    ),
}


@pytest.mark.by_day(
    "auxiliary of targets", "of four stages", "twice", "planned, lent", "planned, of several names"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_module_between_blocks_has_the_numbers_of_one_device(world2: World, name: str) -> None:
    right(world2, *PROGRAMS[name])


@pytest.mark.by_day("0")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_data_parallel_ranks_too(world4: World, zero: int) -> None:
    program = functools.partial(auxiliary, loss="ce", at=1)
    right(world4, program, {**PIPELINE, **SAID, DP: 2, ZERO: zero})


UNSAID: dict[str, Callable[[], nn.Module]] = {
    "aux": lambda: Auxiliary("mse", 0),
    "lent": Lending,
}


def unsaid(name: str) -> None:
    Run(PIPELINE).train(UNSAID[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSAID)
def test_a_module_whose_place_is_not_known_is_refused_with_the_key(
    world2: World, tmp_path: Path, name: str
) -> None:
    message = (
        r"behind which it is called, all of them, in pipeline_parallel.called_behind \(\{'" + name
    )
    check(world2, Exception, message, in_short_group, str(tmp_path), unsaid, name)
    world2.close()
