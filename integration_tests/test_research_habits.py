"""Programs of research code give one device's numbers, or are refused by name."""

from __future__ import annotations

import pytest

from vescale_testing import World

from . import habits_of_research as habits
from .plans import DP, ZERO, Constraints
from .programs import DATA, PIPELINE, TENSOR, Program, both, right
from .test_bad_input import check

PLANS: dict[str, Constraints] = {**DATA, "pp": PIPELINE, "tp": TENSOR}
CASES: list[tuple[Program, str]] = [
    (habits.integrated, "dp"),
    (habits.equilibrium, "zero2"),
    (habits.equilibrium, "zero3"),
    (habits.waves, "pp"),
    (habits.waves_with_norm, "dp"),
    (habits.points, "dp"),
    (habits.matched, "zero3"),
    (habits.tied_lists, "pp"),
    (habits.state_spaces, "pp"),
    (habits.spoken, "tp"),
]


@pytest.mark.by_day("equilibrium-zero2", "equilibrium-zero3", "points-dp", "state_spaces-pp")
@pytest.mark.slow
@pytest.mark.parametrize(("program", "plan"), CASES)
def test_a_program_of_research_gives_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_sharded_parameters_that_a_backward_asks_for_are_refused(
    world2: World, stage: int
) -> None:
    message = "a backward pass asks for gradients of 'blocks.1"
    check(world2, ValueError, message, both, habits.integrated, {DP: 2, ZERO: stage})


@pytest.mark.slow
def test_targets_without_rows_that_differ_are_refused_where_rows_depend_on_each_other(
    world2: World,
) -> None:
    message = r"argument \[1\] has no rows of the batch but other values on other ranks"
    check(world2, ValueError, message, both, habits.detected, {DP: 2})


@pytest.mark.slow
def test_a_loader_that_puts_rows_of_a_sample_apart_is_refused_where_their_order_matters(
    world2: World,
) -> None:
    check(world2, ValueError, "puts rows of one sample apart", both, habits.rewarded, {DP: 2})


@pytest.mark.slow
def test_losses_that_are_computed_after_the_call_are_refused(world2: World) -> None:
    check(world2, TypeError, "got a generator", both, habits.one_by_one, {DP: 2, ZERO: 3})
