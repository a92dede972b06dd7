"""Parts of blocks that a model calls outside of their block, as diffusion transformers do."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import RankError, World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints
from .programs import DATA, WIDTH, Run, attempt, right, right_or_refused, rows, sgd
from .test_pipeline_between_blocks import BEHIND, Lending

PLANS: dict[str, Constraints] = {
    **DATA,
    "kept": {DP: 2, ZERO: 3, "data_parallel.reshard_after_forward": False},
    "recompute": {DP: 2, ZERO: 3, "recompute": "full"},
    "accumulation": {DP: 2, ZERO: 3, "batch.gradient_accumulation": 2},
    "early": {DP: 2, ZERO: 2, "batch.gradient_accumulation": 2},
    "tp": {TP: 2},
}
STAGES: Constraints = {PP: 2, PARTS: 2}
PIPELINES: dict[str, Constraints] = {
    "pp": STAGES,
    "pp4": {PP: 4, PARTS: 4},
    "interleaved": {
        PP: 2,
        PARTS: 4,
        "pipeline_parallel.virtual_stages": 2,
        "pipeline_parallel.schedule": "interleaved_1f1b",
    },
    "recompute": {**STAGES, "recompute": "full"},
    "tp": {**STAGES, TP: 2},
    "zero1": {**STAGES, DP: 2, ZERO: 1},
    "zero3": {**STAGES, DP: 2, ZERO: 3},
}
# Nothing is freed, or backward finds what it needs: refused otherwise.
WITHIN = ["dp", "zero2", "early", "tp"]


class Condition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down: nn.Module = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.condition = Condition()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * (1 + self.scale(self.condition(y)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, other: nn.Module | None = None) -> Tensor:
        x = x + self.linear(self.norm(x, y)).tanh()
        return x if other is None else self.linear(x + other(x))


class Conditioned(nn.Module):
    """Calls parts of blocks where ``where`` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def condition(self, index: int) -> Condition:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block.norm.condition

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, y = self.first(batch["x"]), batch["y"]
        if self.where == "before":
            x = x + self.condition(-1)(y)
        for index, block in enumerate(self.blocks):
            other = self.condition(0) if self.where == "within" and index == 2 else None
            x = block(x, y, other) if other is not None else block(x, y)
            if self.where == "between" and index == 1:
                x = x * (1 + self.condition(index)(y) + self.condition(3)(x))
        if self.where == "behind":
            x = x * (1 + self.condition(0)(y))
        if self.where == "twice":
            x = self.condition(2)(self.condition(2)(x)) + self.condition(2)(y)
        if self.where == "of a part":
            x = x + self.condition(1)(x) + self.condition(1).up(y)[..., :WIDTH]
        return F.mse_loss(self.head(x), y)


class Shared(Conditioned):
    """All blocks have the same condition, which is no part of any."""

    def __init__(self) -> None:
        super().__init__("behind")
        for block in self.blocks:
            assert isinstance(block, Block)
            block.norm.condition = self.condition(0)


PLACES = ["behind", "before", "between", "twice", "of a part", "within"]


def trained(where: str, run: Run) -> None:
    run.train(Conditioned(where))


def planned(where: str, run: Run) -> None:
    """The planner sees from an example where parts are called."""
    model = Conditioned(where).double()
    if run.constraints is not None:
        known = {**run.constraints, "batch.global_size": 8}
        plan = vescale.generate_plan(model, known, example_batch=(rows(1)[0],))
        found = plan.pipeline_parallel.called_behind
        assert found
        run = Run({**run.constraints, BEHIND: found}, run.results)
    run.train(model)


def dropped(where: str, at: Mapping[str, list[str]], run: Run) -> None:
    """Parts draw, in and out of their blocks, as on one device that runs micro-batches."""
    model = Conditioned(where)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.norm.condition.down = nn.Sequential(block.norm.condition.down, nn.Dropout(0.5))
    is_alone = run.constraints is None
    parts = 2 if is_alone else 1
    if run.constraints is not None:
        run = Run({**run.constraints, BEHIND: at}, run.results)
    model, optimizer = run.start(model)
    torch.manual_seed(3)
    for batch in rows():
        cut = [{name: x.chunk(parts)[i] for name, x in batch.items()} for i in range(parts)]
        losses = [model(part) / parts for part in cut]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(torch.stack([loss.detach() for loss in losses]).sum())
    run.keep(torch.rand(2))
    run.finish(model)


def evaluated_first(run: Run) -> None:
    """Evaluates before it trains, and in between."""
    model, optimizer = run.start(Conditioned("behind"), sgd)
    for batch in rows():
        with torch.no_grad():
            run.keep(model(run.part(batch)))
        loss = model(run.part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


@pytest.mark.by_day("behind-zero3", "within-tp", "within-zero2", "between-recompute")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "plan"),
    [
        pytest.param(where, plan, marks=pytest.mark.nightly)
        for where in PLACES
        for plan in (PLANS if where != "within" else WITHIN)
        # What it cuts off of a result of which tensor-parallel ranks have parts is refused.
        if (where, plan) != ("of a part", "tp")
    ],
)
def test_parts_are_gathered_where_they_are_called(world2: World, where: str, plan: str) -> None:
    right(world2, functools.partial(trained, where), PLANS[plan])


@pytest.mark.slow
def test_parts_may_be_called_in_evaluation_first(world2: World) -> None:
    right(world2, evaluated_first, DATA["zero3"])


def shared(run: Run) -> None:
    run.train(Shared())


def lent(run: Run) -> None:
    """The planner proves what it shards of blocks that are given modules to call."""
    model = Lending().double()
    if run.constraints is None:
        run.train(model)
        return
    plan = vescale.generate_plan(model, run.constraints, example_batch=(rows(1)[0],))
    found = plan.tensor_parallel.sharding_plan
    assert "blocks.*.block.up.weight" in found
    Run({**run.constraints, "tensor_parallel.sharding_plan": found}, run.results).train(model)


@pytest.mark.slow
def test_blocks_that_are_given_modules_are_sharded(world2: World) -> None:
    right(world2, lent, {TP: 2})


@pytest.mark.slow
def test_what_blocks_share_is_no_part_of_one(world2: World) -> None:
    right(world2, shared, DATA["zero3"])


@pytest.mark.slow
def test_parts_called_within_other_blocks_are_refused(world2: World) -> None:
    for answer in world2.run(attempt, functools.partial(trained, "within"), DATA["zero3"]):
        assert answer is ValueError


@pytest.mark.by_day("pp-behind", "pp-within", "pp4-before", "pp-of a part")
@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("plan", ["pp", "pp4", "interleaved", "recompute"])
def test_stages_of_a_pipeline_share_them(
    world2: World, world4: World, plan: str, where: str
) -> None:
    world = world4 if plan == "pp4" else world2
    right(world, functools.partial(planned, where), PIPELINES[plan])


@pytest.mark.by_day("zero3-behind", "tp-before")
@pytest.mark.slow
@pytest.mark.parametrize("where", ["behind", "before", "between", "within"])
@pytest.mark.parametrize("plan", ["tp", "zero1", "zero3"])
def test_stages_share_them_beside_other_axes(world4: World, plan: str, where: str) -> None:
    right(world4, functools.partial(planned, where), PIPELINES[plan])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("behind", {"blocks.0.norm.condition": ["blocks.3"]}),
        ("before", {"blocks.3.norm.condition": [""]}),
    ],
)
def test_parts_draw_as_on_one_device(
    world2: World, where: str, at: Mapping[str, list[str]]
) -> None:
    right(world2, functools.partial(dropped, where, at), STAGES)


@pytest.mark.slow
def test_a_pipeline_that_has_not_seen_them_says_how() -> None:
    right_or_refused(World(2), functools.partial(trained, "behind"), STAGES)


def test_a_part_that_is_none_is_refused(world2: World) -> None:
    places = {"blocks.0.norm.other": ["blocks.3"]}
    with pytest.raises(RankError, match=r"blocks\.0\.norm\.other' is no module of Conditioned"):
        right(world2, functools.partial(trained, "behind"), {**STAGES, BEHIND: places})
