"""Two models in one loop, one of them or both parallelized: right, or refused by name."""

from __future__ import annotations

import warnings

import pytest

from vescale_testing import World

from . import habits_of_pairs as pairs
from .plans import DP, TP, ZERO, Constraints
from .programs import Program, Run, both, right
from .test_bad_input import check
from .test_habits import PLANS

RIGHT: list[Program] = [
    pairs.clipped_together, pairs.distilled, pairs.plain_teacher, pairs.momentum_teacher,
    pairs.copied_teacher, pairs.preferred, pairs.synchronized,
]  # fmt: skip
# A pipeline gives its inputs no gradients, so no other model gets any from it.
RIGHT_WITHOUT_PIPELINE: list[Program] = [
    pairs.adversaries, pairs.adversaries_of_one_call, pairs.chained, pairs.cycled,
]  # fmt: skip
FOUR: dict[str, Constraints] = {"tp-zero3": {TP: 2, DP: 2, ZERO: 3}}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("program", RIGHT)
def test_two_models_have_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3", "tp"])
@pytest.mark.parametrize("program", RIGHT_WITHOUT_PIPELINE)
def test_gradients_from_one_model_reach_the_other(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("program", [pairs.adversaries, pairs.clipped_together])
def test_two_models_on_four_ranks(world4: World, program: Program) -> None:
    right(world4, program, FOUR["tp-zero3"])


@pytest.mark.slow
@pytest.mark.parametrize("program", RIGHT_WITHOUT_PIPELINE)
def test_a_pipeline_says_that_no_other_model_gets_gradients(
    world2: World, program: Program
) -> None:
    message = "x requires a gradient, as for .* what another module computed"
    check(world2, ValueError, message, both, program, PLANS["pp"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_models_that_share_modules_are_one_model(world2: World, plan: str) -> None:
    message = "Models that share modules are parallelized as one"
    check(world2, ValueError, message, both, pairs.sharing, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_has_parameters_of_one_model(world2: World, plan: str) -> None:
    message = "an optimizer of the parallelized model's parameters, got one that holds another"
    check(world2, ValueError, message, both, pairs.of_both, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp", "pp"])
def test_a_plain_head_reads_whole_outputs(world2: World, plan: str) -> None:
    right(world2, pairs.head_beside, PLANS[plan])


def _warnings(program: Program, constraints: Constraints) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(Run(constraints))
    return [str(each.message) for each in caught if "each rank steps by" in str(each.message)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_a_plain_head_on_some_of_the_rows_is_warned_of(world2: World, plan: str) -> None:
    """Each rank trains its own; what is refused is what parallelize sees."""
    for told in world2.run(_warnings, pairs.head_beside, PLANS[plan]):
        assert len(told) == 1
        assert "AdamW steps 2 parameters, the first of shape (8, 8)" in told[0]
    for program in (pairs.clipped_together, pairs.plain_teacher):
        assert world2.run(_warnings, program, PLANS[plan]) == [[], []]
