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

from .models import HandWritten, batches
from .training import Recipe, Record, samples, train, whole

# float64; sums of parts are in another order. An optimizer that divides by gradients, as AdamW,
# makes 1e-10 of one that is zero but for rounding, as of a key's bias: it is compared bitwise.
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)
ACCUMULATE = "batch.gradient_accumulation"
ZERO = "data_parallel.zero_stage"
DP2 = {"data_parallel.size": 2}
PP2 = {"pipeline_parallel.size": 2, "pipeline_parallel.microbatches": 2}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {ACCUMULATE: 4}),
    "dp2": (2, {**DP2, ACCUMULATE: 4}),
    "zero1": (2, {**DP2, ZERO: 1, ACCUMULATE: 2}),
    "zero2": (2, {**DP2, ZERO: 2, ACCUMULATE: 2}),
    "zero3": (2, {**DP2, ZERO: 3, ACCUMULATE: 4}),
    "zero3 recomputed": (2, {**DP2, ZERO: 3, ACCUMULATE: 2, "recompute": "full"}),
    "tp2": (2, {"tensor_parallel.size": 2, ACCUMULATE: 2}),
    "pp2": (2, {**PP2, ACCUMULATE: 2}),
    "dp4": (4, {"data_parallel.size": 4, ZERO: 1, ACCUMULATE: 2}),
    "dp2 x tp2": (4, {**DP2, "tensor_parallel.size": 2, ZERO: 3, ACCUMULATE: 2}),
    "dp2 x pp2": (4, {**DP2, **PP2, ZERO: 1, ACCUMULATE: 2}),
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


@pytest.mark.by_day("zero3 recomputed-hand_written")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        *((plan, "hand_written") for plan in PLANS),
        *((plan, "gpt2") for plan in ("dp2", "dp2 x tp2")),
        *((plan, "llama") for plan in ("zero3", "dp2 x pp2")),
    ],
)
def test_micro_batches_have_the_gradients_of_the_whole_batch(
    request: pytest.FixtureRequest, plan: str, model: str
) -> None:
    size, constraints = PLANS[plan]
    world: World = request.getfixturevalue(f"world{size}")
    evaluate = model == "gpt2"
    recipe = Recipe(model=model, steps=2, evaluate=evaluate, optimizer="momentum")
    world.run(_compare, recipe, constraints)


def _by_hand(constraints: dict[str, Any]) -> None:
    recipe = Recipe(
        model="hand_written", steps=2, accumulate=2, loss_factor=0.5, optimizer="momentum"
    )
    _same(train(recipe, constraints), train(recipe))


HAND: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, DP2),
    "zero1": (2, {**DP2, ZERO: 1}),
    "zero2": (2, {**DP2, ZERO: 2}),
    "zero3": (2, {**DP2, ZERO: 3}),
    "tp2": (2, {"tensor_parallel.size": 2}),
    "both": (2, {**DP2, ZERO: 2, ACCUMULATE: 2}),
}


@pytest.mark.by_day("both")
@pytest.mark.slow
@pytest.mark.parametrize("plan", HAND)
def test_a_loop_that_accumulates_itself_has_the_gradients_of_one_device(
    request: pytest.FixtureRequest, plan: str
) -> None:
    size, constraints = HAND[plan]
    world: World = request.getfixturevalue(f"world{size}")
    world.run(_by_hand, constraints)


class Summed(HandWritten):
    """Of whose loss a part of a batch has its share: by the targets that count in all of it."""

    def forward(self, batch: Any) -> Tensor:
        x_BSF = self.embed(batch["input_ids"])
        x_BSF = x_BSF + self.positions[:, : x_BSF.shape[1]]
        for block in self.blocks:
            x_BSF, _ = block(x_BSF)
        logits_BSV = self.head(self.norm(x_BSF))
        logits, labels = logits_BSV.flatten(0, 1), batch["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum") * batch["parts"] / batch["count"]


def _alone(
    model: nn.Module, batch: dict[str, Tensor], ranks: int, parts: int, *, by_part: bool
) -> float:
    """Run a batch in micro-batches as one device does, and add up in the order of ranks.

    Args:
        model: Gets the gradients.
        batch: The global batch.
        ranks: Data-parallel ones, of consecutive rows.
        parts: Micro-batches of a rank.
        by_part: Whether gradients of blocks are added over ranks after every micro-batch, else at
            the end as all others.
    """
    count = (batch["labels"] != -100).sum()
    rows = [
        {name: tensor.chunk(ranks)[rank].chunk(parts)[part] for name, tensor in batch.items()}
        for rank in range(ranks)
        for part in range(parts)
    ]
    losses: list[Tensor] = []
    gradients: list[list[Tensor]] = []
    for each in rows:
        loss = model({**each, "count": count, "parts": ranks * parts})
        losses.append(loss.detach())
        (loss / parts).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        of_rank = [
            [gradients[rank * parts + part][index] for part in range(parts)]
            for rank in range(ranks)
        ]
        groups = zip(*of_rank, strict=True) if by_part and name.startswith("blocks.") else of_rank
        sums = [functools.reduce(torch.add, group) for group in groups]
        parameter.grad = functools.reduce(torch.add, sums) / ranks
    return float(torch.stack(losses).double().sum() / len(losses))


def _to_the_bit(constraints: dict[str, Any], by_part: bool) -> None:
    torch.manual_seed(0)
    alone = Summed()
    expected = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    torch.manual_seed(0)
    plan = with_constraints(vescale.ParallelPlan(), constraints)
    model, optimizer = vescale.parallelize(
        plan, HandWritten(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)
    )
    ranks, rank = plan.data_parallel.size, vescale.data_parallel_rank(model)
    for batch in batches(3, uneven=True):
        loss = _alone(alone, batch, ranks, plan.num_microbatches, by_part=by_part)
        expected.step()
        expected.zero_grad()
        found = model({name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()})
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found.item() == torch.tensor(loss).item()
    for (name, own), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(own), other), name


EXACT: dict[str, tuple[int, dict[str, Any], bool]] = {
    "one rank": (1, {ACCUMULATE: 4}, False),
    "dp2": (2, {**DP2, ACCUMULATE: 4}, False),
    "zero1": (2, {**DP2, ZERO: 1, ACCUMULATE: 2}, False),
    "zero2": (2, {**DP2, ZERO: 2, ACCUMULATE: 4}, True),
    "zero3": (2, {**DP2, ZERO: 3, ACCUMULATE: 2}, True),
    "pp2": (2, {**PP2, ACCUMULATE: 2}, False),
    "dp4": (4, {"data_parallel.size": 4, ACCUMULATE: 2}, False),
}


@pytest.mark.by_day("one rank")
@pytest.mark.slow
@pytest.mark.parametrize("plan", EXACT)
def test_micro_batches_are_those_of_one_device_to_the_bit(
    request: pytest.FixtureRequest, plan: str
) -> None:
    size, constraints, by_part = EXACT[plan]
    world: World = request.getfixturevalue(f"world{size}")
    world.run(_to_the_bit, constraints, by_part)


def _runs_of_blocks() -> int:
    plan = with_constraints(vescale.ParallelPlan(), {ACCUMULATE: 4, "recompute": "full"})
    model = vescale.parallelize(plan, HandWritten())
    runs: list[str] = []
    for fqn in ("blocks.0", "blocks.1", "blocks.2", "blocks.3"):
        norm = model.get_submodule(f"{fqn}.norm")
        norm.register_forward_hook(lambda *_: runs.append("one"))
    (batch,) = batches(1)
    model(batch).backward()
    return len(runs)


@pytest.mark.slow
def test_whole_blocks_are_recomputed_in_every_micro_batch(world1: World) -> None:
    assert world1.run(_runs_of_blocks) == [4 * 4 * 2]


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


class LooksInside(LossInside):
    class Head(LossInside.Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            kept = labels.masked_fill(torch.tensor(labels.tolist()) == 3, -100)
            return super().forward(x, kept)

    def __init__(self) -> None:
        super().__init__()
        self.head = LooksInside.Head(8, 37)


def _forwards(make: Callable[[], nn.Module], constraints: dict[str, Any]) -> list[int]:
    """Count the runs of forward in each of three steps."""
    model = vescale.parallelize(with_constraints(vescale.ParallelPlan(), constraints), make())
    embed, runs, counts = model.get_submodule("embed"), list[str](), list[int]()
    embed.register_forward_hook(lambda *_: runs.append("one"))
    rank, size = vescale.data_parallel_rank(model), constraints["data_parallel.size"]
    for batch in batches(3, uneven=True):
        model({name: tensor.chunk(size)[rank] for name, tensor in batch.items()}).backward()
        counts.append(len(runs) - sum(counts))
    return counts


@pytest.mark.slow
def test_forward_runs_once_a_micro_batch_from_the_second_step_on(world2: World) -> None:
    constraints = {**DP2, ZERO: 3, ACCUMULATE: 2}
    for counts in world2.run(_forwards, LossInside, constraints):
        assert counts[1:] == [2, 2]


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
    world2.run(_one_call, LossInside, {**DP2, ZERO: 3, ACCUMULATE: 2})
    world2.run(_warned, LooksInside, {**DP2, ZERO: 3, ACCUMULATE: 2})


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
