"""Rows of a batch that meet, in a loss or in a layer: one device's numbers, or a refusal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_testing import World

from . import coupled_layers, coupled_losses
from .coupled_layers import MODELS
from .coupled_losses import ALONE, LOSSES, Net
from .judge import Trial, judge
from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .test_bad_input import check

# Name: ranks, rows of the global batch, plan.
PLANS: dict[str, tuple[int, int, Constraints]] = {
    "dp": (2, 8, {DP: 2}),
    "dp-3-rows": (2, 6, {DP: 2}),
    "zero1": (2, 8, {DP: 2, ZERO: 1}),
    "zero2": (2, 8, {DP: 2, ZERO: 2}),
    "zero3": (2, 8, {DP: 2, ZERO: 3}),
    "tp": (2, 8, {TP: 2}),
    "tp-dp": (4, 8, {TP: 2, DP: 2}),
    "pp": (2, 8, {PP: 2, PARTS: 2}),
}

# Every one with some plan by day.
DATA = ("dp", "zero2", "dp-3-rows", "zero3", "zero1")
BY_DAY = {
    *((name, DATA[index % len(DATA)]) for index, name in enumerate((*LOSSES, *MODELS))),
    ("tasks", "tp-dp"),
    ("ppo", "tp"),
    ("batch_norm_1d", "tp-dp"),
}
OF_HOURS = {"siglip", "mixtral", "wav2vec2", "whisper", "translator", "translator_dropout"}


def cases(names: Iterable[str]) -> list[Any]:
    """Return names and plans, those that are not for every day marked."""
    return [
        pytest.param(name, plan, id=f"{name}-{plan}", marks=marks(name, plan))
        for name in names
        for plan in PLANS
    ]


def marks(name: str, plan: str) -> pytest.MarkDecorator:
    by_day = (name, plan) in BY_DAY and name not in OF_HOURS
    return pytest.mark.slow if by_day else pytest.mark.nightly


@pytest.fixture
def worlds(world2: World, world4: World) -> dict[int, World]:
    return {2: world2, 4: world4}


def of_loss(name: str, rows: int) -> Trial:
    return Trial(build=partial(Net, name), batches=partial(coupled_losses.batches, rows))


@pytest.mark.by_day(
    "decided_by_each-zero2",
    "ignored_elsewhere-dp-3-rows",
    "mean_of_row_means-dp-3-rows",
    "smoothed-zero1",
    "class_weights-dp",
    "ppo-tp",
    "entropy_of_mean-dp-3-rows",
    "balanced_load-zero3",
    "scaled_by_largest-zero1",
    "centred-dp",
    "spread_as_feature-zero2",
    "mixed_up-dp-3-rows",
    "mean-zero2",
    "tasks-dp-3-rows",
    "ctc-dp",
)
@pytest.mark.parametrize(("name", "plan"), cases(LOSSES))
def test_a_loss_over_the_batch_is_one_devices(
    worlds: dict[int, World], name: str, plan: str
) -> None:
    ranks, rows, constraints = PLANS[plan]
    judgement = judge(worlds, of_loss(name, rows), ranks, constraints)
    # Which of several losses a pipeline is to differentiate has to be said.
    is_clear = name in ALONE and (name, plan) != ("tasks", "pp")
    allowed = {"equal"} if is_clear or plan == "tp" else {"equal", "refused"}
    assert judgement.verdict in allowed, judgement.detail


def of_model(name: str, rows: int) -> Trial:
    model = MODELS[name]
    return Trial(
        build=partial(coupled_layers.build, name),
        batches=partial(coupled_layers.batches, name, rows),
        optimizer="adamw",
        row_dim=model.row_dim,
        casts=model.casts,
    )


@pytest.mark.by_day(
    "batch_norm_plain-zero1",
    "batch_norm_frozen-zero2",
    "batch_norm_function-dp-3-rows",
    "running_mean-zero3",
    "sync_batch_norm-zero1",
    "group_norm-dp",
    "time_first-zero3",
    "lstm-zero1",
    "gru_rows_first-zero2",
    "folded-zero3",
    "folded_dropout_rows_outer-zero1",
    "folded_dropout_time_outer-dp",
)
@pytest.mark.parametrize(("name", "plan"), cases(MODELS))
def test_a_layer_over_the_batch_is_one_devices(
    worlds: dict[int, World], name: str, plan: str
) -> None:
    ranks, rows, constraints = PLANS[plan]
    trial = of_model(name, rows)
    if "dropout" in name:
        # Stages draw what one device draws for the same micro-batches.
        trial = replace(trial, parts=constraints.get(PARTS, 1))
    judgement = judge(worlds, trial, ranks, constraints)
    refusable = MODELS[name].meet or plan == "pp"
    allowed = {"equal", "refused"} if refusable else {"equal"}
    assert judgement.verdict in allowed, judgement.detail


HANDED_OVER = list[Tensor]()


class Scored(nn.Linear):
    """Appends a loss to a list that belongs to no module, as libraries of experts do."""

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        HANDED_OVER.append(made.logsumexp(-1).square().mean())
        return made.tanh()


class SumOfScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scored(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        HANDED_OVER.clear()
        for layer in self.layers:
            x = layer(x)
        spread = x - x.mean(0)  # rows meet
        return spread.square().mean() + torch.stack(HANDED_OVER).sum()


def handed_over() -> None:
    model: Any = vescale.parallelize(make_plan({DP: 2}), SumOfScores())
    model(torch.randn(4, 4))


@pytest.mark.slow
def test_what_a_layer_hands_over_outside_of_the_model_is_refused_where_rows_meet(
    world2: World,
) -> None:
    check(world2, ValueError, "handed it over by a list or an object outside", handed_over)


class Given(nn.Linear):
    """Notes the types of what it is given."""

    def forward(self, input: Tensor) -> Tensor:
        self.seen = {type(input), *map(type, self.parameters())}
        return super().forward(input).tanh()


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Given(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - x.mean(0)).square().mean()  # rows meet


def given_to_layers(plan: Constraints) -> set[type]:
    model: Any = vescale.parallelize(make_plan(plan), Spread())
    model(torch.randn(4, 4)).backward()
    return set().union(*(layer.seen for layer in model.layers))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_layers_without_such_rows_are_given_plain_tensors(world2: World, plan: str) -> None:
    for seen in world2.run(given_to_layers, PLANS[plan][2]):
        assert seen == {Tensor, nn.Parameter}
