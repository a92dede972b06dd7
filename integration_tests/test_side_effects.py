"""What layers keep outside of the model is one device's, or refused by name."""

from __future__ import annotations

import functools

import pytest

from vescale_testing import World

from . import habits_of_side_effects as habits
from .plans import DP, ZERO, Constraints
from .programs import DATA, PIPELINE, TENSOR, Program, Run, both, right
from .test_bad_input import check

PLANS: dict[str, Constraints] = {
    **DATA,
    "tp": TENSOR,
    "zero3-recompute": {DP: 2, ZERO: 3, "recompute": "full"},
}


@pytest.mark.by_day("zero3", "zero3-recompute", "tp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3", "zero3-recompute", "tp"])
def test_losses_in_a_global_list_are_those_of_the_call(world2: World, plan: str) -> None:
    right(world2, habits.added_by_the_loop, PLANS[plan])


@pytest.mark.by_day("added_beside_a_norm", "added_in_forward", "filled")
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [habits.added_beside_a_norm, habits.added_in_forward, habits.counted, habits.filled]
)
def test_trial_runs_leave_nothing_behind(world2: World, program: Program) -> None:
    right(world2, program, PLANS["zero2"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (habits.added_by_the_loop, "into 'BALANCING', which belongs to no module"),
        (habits.added_in_forward, "into 'BALANCING', which belongs to no module"),
        (habits.filled, "'blocks.0' puts tensors into a list or a dict that it is given"),
    ],
)
def test_a_pipeline_refuses_what_blocks_hand_over_outside_of_what_they_return(
    world2: World, program: Program, message: str
) -> None:
    check(world2, ValueError, message, both, program, PIPELINE)


WAYS = ("a list", "a dict", "a global", "an inner module's hook")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_refuses_hooks_that_keep_for_forward(world2: World, way: str) -> None:
    program = functools.partial(habits.hooked, way=way)
    message = r"a hook of 'blocks\.0.*' puts activations into .*, which forward reads"
    check(world2, ValueError, message, both, program, PIPELINE)


@pytest.mark.slow
def test_a_pipeline_refuses_hooks_that_keep_for_forward_when_they_are_added(
    world2: World,
) -> None:
    message = r"a hook of 'blocks\.0.*' puts activations into .*, which forward reads"
    check(world2, ValueError, message, both, habits.hooked_later, PIPELINE)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "zero3-recompute"])
def test_hooks_keep_for_forward_without_a_pipeline(world2: World, plan: str) -> None:
    right(world2, functools.partial(habits.hooked, way="a list"), PLANS[plan])


@pytest.mark.slow
def test_hooks_may_keep_what_has_no_graph_in_a_pipeline(world2: World) -> None:
    right(world2, functools.partial(habits.hooked, way="detached"), PIPELINE)


@pytest.mark.slow
def test_forward_that_does_not_find_what_other_stages_left_is_told_why(world2: World) -> None:
    for notes in world2.run(habits.not_found, Run(PIPELINE)):
        assert "blocks of other stages" in notes
