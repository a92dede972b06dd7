"""Losses of derivatives (physics-informed networks, penalties on gradients): one device's."""

from __future__ import annotations

from itertools import product

import pytest

from vescale_testing import World

from . import habits_of_derivatives as habits
from .plans import DP, TP, ZERO, Constraints
from .programs import Program, both, right
from .test_bad_input import check

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
}
RIGHT: list[Program] = [habits.residual_alone, habits.residual_beside_border]
# Likewise where most is sharded.
OTHERS: list[Program] = [
    habits.residual_of_two_inputs, habits.third_derivative, habits.residual_asked,
    habits.penalty_by_itself, habits.penalty_on_a_loss, habits.residual_within,
    habits.residual_within_of_inputs,
]  # fmt: skip


@pytest.mark.by_day("residual_alone-dp", "residual_alone-zero3", "residual_beside_border-zero2")
@pytest.mark.slow
@pytest.mark.parametrize(("program", "plan"), [*product(RIGHT, PLANS)])
def test_a_loss_of_derivatives_gives_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.by_day(
    "residual_asked", "penalty_on_a_loss", "residual_within", "residual_within_of_inputs"
)
@pytest.mark.slow
@pytest.mark.parametrize("program", OTHERS)
def test_other_losses_of_derivatives_do_on_sharded_parameters(
    world2: World, program: Program
) -> None:
    right(world2, program, PLANS["zero3"])


# Of batches over which data-parallel ranks compute together.
OF_ALL_ROWS: list[Program] = [
    habits.residual_with_batch_norm, habits.penalty_with_batch_norm, habits.forces_of_some,
    habits.attacked_by_coupled_loss, habits.weighed_by_gradients, habits.of_gradients,
    habits.adapting,
]  # fmt: skip


@pytest.mark.by_day("forces_of_some", "attacked_by_coupled_loss")
@pytest.mark.slow
@pytest.mark.parametrize("program", OF_ALL_ROWS)
def test_derivatives_go_through_the_rows_of_all_ranks(world2: World, program: Program) -> None:
    right(world2, program, PLANS["dp"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_blocks_are_ready_for_a_loss_of_what_a_hook_kept(world2: World, plan: str) -> None:
    right(world2, habits.kept_by_a_hook, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_a_gradient_that_no_call_started_is_refused(world2: World, plan: str) -> None:
    message = "got a gradient from a backward pass that did not start"
    check(world2, ValueError, message, both, habits.kept_by_a_hook, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_gradients_of_sharded_parameters_that_forward_asks_for_are_refused(
    world2: World, plan: str
) -> None:
    message = r"of a parameter of a block, as 'blocks\.\d\.up\.weight': data_parallel.zero_stage 2"
    check(world2, ValueError, message, both, habits.adapting_all, PLANS[plan])
