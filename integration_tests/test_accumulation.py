"""Micro-batches inside of one call: losses and gradients of one device over the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import with_constraints
from vescale_testing import World

from .models import HandWritten
from .training import Recipe, Record, samples, train, whole

# float64; sums of parts are in another order.
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
ACCUMULATE = "batch.gradient_accumulation"
ZERO = "data_parallel.zero_stage"
DP2 = {"data_parallel.size": 2}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {ACCUMULATE: 4}),
    "dp2": (2, {**DP2, ACCUMULATE: 4}),
    "zero1": (2, {**DP2, ZERO: 1, ACCUMULATE: 2}),
    "zero2": (2, {**DP2, ZERO: 2, ACCUMULATE: 2}),
    "zero3": (2, {**DP2, ZERO: 3, ACCUMULATE: 4}),
    "zero3 recomputed": (2, {**DP2, ZERO: 3, ACCUMULATE: 2, "recompute": "full"}),
    "tp2": (2, {"tensor_parallel.size": 2, ACCUMULATE: 2}),
    "pp2": (2, {"pipeline_parallel.size": 2, "pipeline_parallel.microbatches": 2, ACCUMULATE: 2}),
    "dp2 x tp2": (4, {**DP2, "tensor_parallel.size": 2, ZERO: 3, ACCUMULATE: 2}),
}


def _same(found: Record, expected: Record) -> None:
    for name in ("losses", "norms", "evaluations"):
        assert_close(
            torch.tensor(getattr(found, name), dtype=torch.float64),
            torch.tensor(getattr(expected, name), dtype=torch.float64),
        )
    for name, parameter in found.parameters.items():
        assert_close(parameter, expected.parameters[name])


def _compare(recipe: Recipe, constraints: dict[str, Any]) -> None:
    _same(train(recipe, constraints), train(recipe))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model"),
    [*((plan, "hand_written") for plan in PLANS), ("dp2", "gpt2"), ("dp2 x tp2", "gpt2")],
)
def test_micro_batches_have_the_gradients_of_the_whole_batch(
    request: pytest.FixtureRequest, plan: str, model: str
) -> None:
    size, constraints = PLANS[plan]
    world: World = request.getfixturevalue(f"world{size}")
    world.run(_compare, Recipe(model=model, steps=2, evaluate=model == "gpt2"), constraints)


def _by_hand(constraints: dict[str, Any]) -> None:
    recipe = Recipe(model="hand_written", steps=2, accumulate=2, loss_factor=0.5)
    _same(train(recipe, constraints), train(recipe))


HAND: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, DP2),
    "zero1": (2, {**DP2, ZERO: 1}),
    "zero2": (2, {**DP2, ZERO: 2}),
    "zero3": (2, {**DP2, ZERO: 3}),
    "tp2": (2, {"tensor_parallel.size": 2}),
    "both": (2, {**DP2, ZERO: 2, ACCUMULATE: 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", HAND)
def test_a_loop_that_accumulates_itself_has_the_gradients_of_one_device(
    request: pytest.FixtureRequest, plan: str
) -> None:
    size, constraints = HAND[plan]
    world: World = request.getfixturevalue(f"world{size}")
    world.run(_by_hand, constraints)


class Dropping(HandWritten):
    """Draws, and has a loss that is a mean over rows beside that over targets."""

    def forward(self, batch: Any) -> Tensor:
        x_BSF = F.dropout(self.embed(batch["input_ids"]), 0.3, self.training)
        for block in self.blocks:
            x_BSF, _ = block(x_BSF)
            x_BSF = F.dropout(x_BSF, 0.2, self.training)
        logits_BSV = self.head(self.norm(x_BSF))
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten())
        return loss + 0.01 * logits_BSV.square().mean()


class LossInside(nn.Module):
    """A module that holds parameters and is given the targets."""

    class Head(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return F.cross_entropy(super().forward(x).flatten(0, 1), labels.flatten())

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 8)
        self.head = LossInside.Head(8, 37)

    def forward(self, batch: Any) -> Tensor:
        return self.head(self.embed(batch["input_ids"]), batch["labels"])


def _one_call(make: Callable[[], nn.Module], constraints: dict[str, Any]) -> None:
    torch.manual_seed(0)
    alone = make().double()
    torch.manual_seed(0)
    model = make().double()
    rows = samples(1, uneven=True)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    torch.manual_seed(4)
    expected = alone(batch)
    expected.backward()
    drawn = torch.rand(3)
    plan = with_constraints(vescale.ParallelPlan(), constraints)
    model = vescale.parallelize(plan, model)
    rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size
    mine = {name: tensor.chunk(size)[rank] for name, tensor in batch.items()}
    torch.manual_seed(4)
    loss = model(mine)
    loss.backward()
    assert_close(loss.detach(), expected.detach())
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            assert own.grad is not None
            assert_close(whole(own.grad), other.grad)
    assert torch.equal(torch.rand(3), drawn)


def _warned(make: Callable[[], nn.Module], constraints: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="could not be counted without running the model"):
        _one_call(make, constraints)


@pytest.mark.slow
def test_dropout_draws_what_one_device_draws_for_the_whole_batch(world2: World) -> None:
    world2.run(_one_call, Dropping, {**DP2, ACCUMULATE: 2})


@pytest.mark.slow
def test_targets_are_counted_where_a_module_with_parameters_has_the_loss(world2: World) -> None:
    world2.run(_warned, LossInside, {**DP2, ZERO: 3, ACCUMULATE: 2})


def _refused(make: Callable[[], nn.Module], rows: int, text: str) -> None:
    plan = with_constraints(vescale.ParallelPlan(), {ACCUMULATE: 2})
    with pytest.raises(ValueError, match=text):
        vescale.parallelize(plan, make())(torch.randn(rows, 4))


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.proj(x) @ x.T).softmax(-1).log().diagonal().mean()


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def _features() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("make", "rows", "text"),
    [
        (_batch_norm, 4, "normalizes over the batch, of which batch.gradient_accumulation runs 2"),
        (_features, 4, "need a module whose forward returns its loss"),
        (_features, 3, r"divide into 2 micro-batches \(batch.gradient_accumulation\), got 3"),
        (Contrast, 4, "rows of the batch depend on each other .* batch.gradient_accumulation"),
    ],
)
def test_what_cannot_run_in_parts_is_refused(
    world1: World, make: Callable[[], nn.Module], rows: int, text: str
) -> None:
    world1.run(_refused, make, rows, text)
