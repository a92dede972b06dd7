"""Results of a call that others are computed from are so for the loop, too."""

from __future__ import annotations

from itertools import product

import pytest

from vescale_testing import World

from . import habits_of_several_results as habits
from .programs import DATA, TENSOR, Program, right

PROGRAMS: list[Program] = [
    habits.path_lengths, habits.by_several, habits.by_points_of_its_own, habits.by_what_was_given,
    habits.kept_and_turned, habits.of_all_results,
]  # fmt: skip
PLANS = {**DATA, "tp": TENSOR}


@pytest.mark.by_day("path_lengths-dp", "by_several-zero3", "by_what_was_given-tp")
@pytest.mark.slow
@pytest.mark.parametrize(("program", "plan"), [*product(PROGRAMS, PLANS)])
def test_gradients_by_results_have_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])
