"""``torch.func.functional_call``, and models that call themselves: right, or refused by name."""

from __future__ import annotations

import pytest

from vescale_testing import World

from . import habits_of_functional_calls as habits
from .programs import Program, both, right
from .test_bad_input import check
from .test_habits import PLANS

RIGHT: list[Program] = [
    habits.block_as_it_is, habits.head_of_more, habits.itself, habits.itself_as_it_is,
]  # fmt: skip
RIGHT_BUT_SHARDED: list[Program] = [habits.block_of_less, habits.itself_of_less]


@pytest.mark.by_day(
    "block_as_it_is-dp",
    "block_as_it_is-pp",
    "head_of_more-tp",
    "head_of_more-pp",
    "itself-dp",
    "itself-zero3",
    "itself-pp",
    "itself_as_it_is-dp",
)
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("program", RIGHT)
def test_a_functional_call_gives_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.by_day("block_of_less-dp", "block_of_less-tp", "itself_of_less-tp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "tp"])
@pytest.mark.parametrize("program", RIGHT_BUT_SHARDED)
def test_blocks_are_called_with_what_is_made_of_their_parameters(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("program", RIGHT_BUT_SHARDED)
def test_what_is_made_of_sharded_parameters_is_refused(world2: World, program: Program) -> None:
    message = r"up.weight' was replaced for a call of its block, by torch.func.functional_call"
    check(world2, ValueError, message, both, program, PLANS["zero3"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_a_block_computes_with_weights_that_another_module_made(world2: World, plan: str) -> None:
    right(world2, habits.made_by_another, PLANS[plan])


@pytest.mark.by_day(
    "assigned_in_forward-tp",
    "with_other_values-dp",
    "with_other_values-zero3",
    "with_other_values-tp",
)
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3", "tp"])
@pytest.mark.parametrize("program", [habits.assigned_in_forward, habits.with_other_values])
def test_parameters_that_would_not_stay_are_refused(
    world2: World, program: Program, plan: str
) -> None:
    check(world2, ValueError, "was replaced after parallelize", both, program, PLANS[plan])
