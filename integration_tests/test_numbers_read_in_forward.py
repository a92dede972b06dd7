"""What code of a model reads of activations, and decides by, is of the whole, or is refused."""

from __future__ import annotations

import functools

import pytest

from vescale_dtensor import DTensor
from vescale_parallel import propose_sharding
from vescale_testing import World

from . import habits_of_numbers as habits
from .habits_of_numbers import Look
from .plans import CP, DP, PARTS, PP, TP, ZERO, Constraints
from .programs import Run, right
from .test_bad_input import check

SHARED: dict[str, Constraints] = {
    "tp": {TP: 2},
    "cp": {CP: 2},
    "cp-ring": {CP: 2, "context_parallel.method": "ring"},
}
LOOKS: list[Look] = [
    habits.branches,
    habits.branches_on_an_item,
    habits.logs,
    habits.lists,
    habits.converts,
    habits.adds,
    habits.guards,
]


@pytest.mark.by_day("tp-branches", "cp-branches", "tp-logs", "cp-logs", "tp-adds", "cp-adds")
@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
@pytest.mark.parametrize("plan", SHARED)
def test_numbers_are_of_all_features_and_positions(world2: World, plan: str, look: Look) -> None:
    right(world2, functools.partial(habits.trained, look), SHARED[plan])


def test_counts_are_of_all_features(world2: World) -> None:
    right(world2, functools.partial(habits.trained, habits.counts), {TP: 2})


@pytest.mark.parametrize("stage", [0, 3])
def test_branches_are_those_of_the_global_batch(world2: World, stage: int) -> None:
    right(world2, functools.partial(habits.trained, habits.branches), {DP: 2, ZERO: stage})


@pytest.mark.parametrize("stage", [2, 3])
def test_numbers_are_read_of_gathered_weights_by_numpy(world2: World, stage: int) -> None:
    # NumPy keeps the memory of what it reads: torch resizes it no more.
    right(world2, functools.partial(habits.trained, habits.converts_weights), {DP: 2, ZERO: stage})


def start(look: Look, constraints: Constraints) -> None:
    model, _ = habits.started(look, constraints)
    model(**habits.batch_of(0))


def test_a_pipeline_refuses_branches_by_numbers_of_all_rows(world2: World) -> None:
    message = r"line \d+ of habits_of_numbers.py .*decides by a number that depends on all rows"
    check(world2, ValueError, message, start, habits.branches, {PP: 2, PARTS: 2})


READS = r"line \d+ of habits_of_numbers.py .*reads a number, which is another one"


@pytest.mark.slow
@pytest.mark.parametrize("look", [habits.branches, habits.logs])
def test_a_plan_by_hand_is_refused(world2: World, look: Look) -> None:
    said = {"blocks.*.up.weight": "Shard(0)", "blocks.*.up.bias": "Shard(0)"}
    manual: Constraints = {
        TP: 2,
        "tensor_parallel.sharding_policy": "manual",
        "tensor_parallel.sharding_plan": {**said, "blocks.*.down.weight": "Shard(1)"},
    }
    check(world2, ValueError, READS, start, look, manual)


def without_example(run: Run) -> None:
    model, optimizer = run.start(habits.Model(habits.branches))
    loss = model(**habits.batch_of(0))
    loss.backward()
    optimizer.step()
    run.keep(loss)
    run.finish(model)


def test_without_an_example_they_are_of_all_features_too(world2: World) -> None:
    right(world2, without_example, {TP: 2})


def sharded_by(look: Look) -> list[str]:
    model, _ = habits.started(look, {TP: 2})
    named = model.named_parameters()
    return [fqn for fqn, x in named if isinstance(x, DTensor) and x.to_local().shape != x.shape]


@pytest.mark.parametrize("look", [habits.guards, habits.branches])
def test_only_layers_whose_numbers_are_read_stay_whole(world2: World, look: Look) -> None:
    for sharded in world2.run(sharded_by, look):
        assert "blocks.0.attention.qkv.weight" in sharded
        assert ("blocks.0.up.weight" in sharded) == (look is habits.guards)


@pytest.mark.parametrize("look", [habits.branches, habits.logs, habits.adds])
def test_a_plan_says_why_layers_stay_whole(look: Look) -> None:
    found = propose_sharding(
        habits.Model(look).double(), "auto", 2, example_batch=habits.batch_of(0)
    )
    what = "'LOSSES' is of a rank's part" if look is habits.adds else "habits_of_numbers.py"
    assert any(what in why for why in found.left_whole.values()), found.left_whole
