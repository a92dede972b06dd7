"""Forwards that transform functions (torch.func, vmap, dual numbers) give one device's numbers."""

from __future__ import annotations

import pytest

from vescale_testing import World

from . import habits_of_transforms as habits
from .plans import DP, ZERO, Constraints
from .programs import DATA, PIPELINE, Program, both, right
from .test_bad_input import check

ACCUMULATED: Constraints = {DP: 2, ZERO: 3, "batch.gradient_accumulation": 2}
PLANS: dict[str, Constraints] = {**DATA, "accumulated": ACCUMULATED}
PROGRAMS = [
    habits.forces,
    habits.tangents,
    habits.dual_numbers,
    habits.mapped,
    habits.means_of_rows,
    habits.ensemble,
]


@pytest.mark.by_day("zero2-forces", "zero3-tangents", "dp-means_of_rows", "accumulated-mapped")
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("plan", PLANS)
def test_functions_of_blocks_are_transformed_in_forward(
    world2: World, plan: str, program: Program
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("program", [habits.tangents, habits.mapped])
def test_blocks_of_a_pipeline_in_functions_that_are_transformed_are_refused(
    world2: World, program: Program
) -> None:
    message = "'blocks.0' was called within torch.vmap or a transform of torch.func"
    check(world2, ValueError, message, both, program, PIPELINE)


@pytest.mark.slow
def test_transforms_of_code_over_all_rows_are_refused(world2: World) -> None:
    message = "rows of the batch depend on each other in code that transforms a function"
    check(world2, ValueError, message, both, habits.saliency, {DP: 2})
