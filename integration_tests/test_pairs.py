"""Two models in one loop, one of them or both parallelized: right, or refused by name."""

from __future__ import annotations

from itertools import product

import pytest

from vescale_testing import World

from . import habits_of_pairs as pairs
from .plans import DP, TP, ZERO, Constraints
from .programs import Program, both, right
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


@pytest.mark.by_day("distilled-zero3", "copied_teacher-dp")
@pytest.mark.slow
@pytest.mark.parametrize(("program", "plan"), [*product(RIGHT, PLANS)])
def test_two_models_have_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.by_day("adversaries-dp", "chained-tp")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plan"), [*product(RIGHT_WITHOUT_PIPELINE, ["dp", "zero3", "tp"])]
)
def test_gradients_from_one_model_reach_the_other(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("program", [pairs.adversaries, pairs.clipped_together])
def test_two_models_on_four_ranks(world4: World, program: Program) -> None:
    right(world4, program, FOUR["tp-zero3"])


@pytest.mark.by_day("adversaries", "adversaries_of_one_call", "chained")
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
