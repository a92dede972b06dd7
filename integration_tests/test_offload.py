"""With ``data_parallel.offload`` plans train as without: loops and optimizers."""

from __future__ import annotations

from typing import Any

import pytest

from vescale_testing import World

from . import habits_of_loops as loops, habits_of_optimizers as optimizers, test_optimizers
from .plans import COPIES, DP, PARTS, PP, TP, ZERO, Constraints
from .programs import Program, assert_right, right
from .test_habits import RIGHT
from .test_one_device_equivalence import check
from .training import Recipe, train

OFFLOAD = "data_parallel.offload"
PLANS: dict[str, Constraints] = {
    "dp": {DP: 2, OFFLOAD: "optimizer"},
    "zero2": {DP: 2, ZERO: 2, OFFLOAD: "optimizer"},
    "zero3": {DP: 2, ZERO: 3, OFFLOAD: "parameters"},
    "tp": {TP: 2, OFFLOAD: "optimizer"},
    "pp": {PP: 2, PARTS: 2, OFFLOAD: "optimizer"},
    "pp, gathered": {PP: 2, PARTS: 2, ZERO: 3, OFFLOAD: "parameters"},
}
IN_CI = {
    "zero3": [
        loops.by_hand_fused, loops.frozen_later, loops.scaled, loops.one_rank_overflows,
        loops.new_group_with_own_lr, loops.reloaded_optimizer, loops.parameter_hooks,
        loops.accumulate_hooks, loops.clip_value, loops.accumulated, loops.evaluated,
        optimizers.averaged_model,
    ],
    "pp": [loops.scaled, loops.accumulated],
}  # fmt: skip


@pytest.mark.by_day(
    "zero3-by_hand_fused",
    "zero3-clip_value",
    "zero3-accumulate_hooks",
    "zero3-averaged_model",
    "pp-scaled",
    "pp-accumulated",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "program"),
    [
        pytest.param(
            plan, program, marks=() if program in IN_CI.get(plan, ()) else pytest.mark.nightly
        )
        for plan in PLANS
        for program in RIGHT
    ],
)
def test_a_habit_gives_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


FOUR: dict[str, Constraints] = {
    "hybrid": {DP: 4, ZERO: 3, COPIES: 2, OFFLOAD: "parameters"},
    "tp": {TP: 2, DP: 2, ZERO: 3, OFFLOAD: "parameters"},
    "pp": {PP: 2, PARTS: 2, DP: 2, ZERO: 1, OFFLOAD: "optimizer"},
    "pp, gathered": {PP: 2, PARTS: 2, DP: 2, ZERO: 3, OFFLOAD: "parameters"},
}


@pytest.mark.by_day("pp, gathered-gpt2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("hybrid", "hand_written"),
        ("pp, gathered", "gpt2"),
        ("tp", "llama"),
        *(
            (plan, model)
            for plan in FOUR
            for model in ("gpt2", "qwen3", "gemma")
            if (plan, model) != ("pp, gathered", "gpt2")
        ),
    ],
)
def test_training_is_that_of_one_device(world4: World, plan: str, model: str) -> None:
    check(world4, Recipe(model=model, deferred=model == "gpt2"), FOUR[plan])


@pytest.mark.by_day("llama-muon and adamw")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "made"), [("llama", "muon and adamw"), ("gpt2", "adafactor"), ("llama", "signs")]
)
def test_optimizers_of_matrices_and_of_ones_own_step_on_the_host(
    world2: World, name: str, made: str
) -> None:
    for answers in world2.run(test_optimizers.on_rank, name, made, PLANS["zero3"]):
        assert_right(answers)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 3])
def test_on_a_gpu_losses_are_those_without(gpu_worlds: dict[int, World], stage: int) -> None:
    recipe = Recipe(model="llama", dtype="float32", device="cuda")
    constraints: dict[str, Any] = {DP: 2, ZERO: stage}
    kind = "parameters" if stage == 3 else "optimizer"
    expected = gpu_worlds[2].run(train, recipe, constraints)
    found = gpu_worlds[2].run(train, recipe, {**constraints, OFFLOAD: kind})
    for record, other in zip(found, expected, strict=True):
        # AdamW on a CPU fuses and rounds other operations than on a GPU.
        assert record.losses == pytest.approx(other.losses, rel=1e-5, abs=0)
