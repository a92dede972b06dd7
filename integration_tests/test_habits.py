"""Habits of ordinary training loops under every kind of plan: right, or refused by name."""

from __future__ import annotations

from itertools import product

import pytest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import vescale
from vescale_testing import World

from . import (
    habits_of_gradients as gradients,
    habits_of_loops as loops,
    habits_of_models as models,
    habits_of_optimizers as optimizers,
)
from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .programs import Program, assert_right, both, right
from .test_bad_input import check

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
}
RIGHT: list[Program] = [
    loops.by_hand_sgd, loops.by_hand_adamw, loops.by_hand_fused, loops.by_hand_plain_loop,
    loops.by_hand_adafactor, loops.by_hand_lbfgs, loops.two_optimizers, loops.other_model,
    loops.frozen_parts, loops.frozen_later, loops.unfrozen_later, loops.kept_gradients,
    loops.model_zero_grad, loops.scaled, loops.one_rank_overflows, loops.lr_by_hand,
    loops.scheduler_after, loops.reloaded_optimizer, loops.new_group_with_own_lr,
    loops.optimizer_hooks, loops.doubled, loops.grad_replaced, loops.clip_value, loops.norms,
    loops.parameter_hooks, loops.hooks_before, loops.accumulate_hooks,
    loops.optimizers_in_backward, loops.retained, loops.discarded, loops.not_differentiated,
    loops.no_grad_between, loops.accumulated, loops.evaluated, loops.no_backward,
    models.ddp_after, models.ddp_before, models.data_parallel_module, models.moved,
    models.applied, models.random_init, models.edited, models.tied_before,
    models.averaged_before, models.average_by_hand, models.average_swapped_in,
    optimizers.switches, optimizers.zeroed_in_place, optimizers.clipped_by_a_hook,
    optimizers.unfrozen_in_steps, optimizers.scheduled_by_two, optimizers.averaged_by_torch,
    models.copied, optimizers.averaged_model, gradients.backward_to_parameters,
    gradients.backward_to_some, gradients.backward_to_some_then_all, gradients.gradients_by_grad,
    gradients.gradients_of_two_losses, gradients.asked_with_hooks, models.written_in_place,
]  # fmt: skip
RIGHT_WITHOUT_PIPELINE: list[Program] = [
    loops.twice, models.recurrent, models.paired, models.normed_by_hooks,
    models.without_elements, gradients.asked_twice, gradients.asked_beside_inputs,
    gradients.penalty_on_inputs, gradients.penalty_on_norms, gradients.forces,
    gradients.forces_in_training, gradients.attacked,
]  # fmt: skip
RIGHT_ON_ROWS: list[Program] = [
    optimizers.statistics_anew,
    optimizers.statistics_of_an_average,
    models.normalized_and_written_in_place,
]
REFUSED: dict[str, tuple[Program, str]] = {
    "lbfgs": (
        loops.lbfgs,
        "LBFGS couples all parameters and calls the model in a closure; make it after",
    ),
    "mapped_by_rows": (
        gradients.mapped_by_rows,
        "was called within torch.vmap or torch.func.grad",
    ),
    "asked_for_graph": (
        gradients.asked_for_graph,
        "create_graph=True\\) of the parameters of a parallelized model asks for a graph through",
    ),
    "plain_grad": (loops.plain_grad, "gradient of a parameter .* to be a distributed tensor"),
    "halved": (models.halved, "'embed.weight' was replaced after parallelize"),
    "tied_later": (models.tied_later, "'head.weight' was replaced after parallelize"),
    "added_later": (models.added_later, "'head.weight' was added to the model after"),
    "adapted_later": (models.adapted_later, "'blocks.1.adapter.weight' was added to the model"),
}
REFUSED_ON_ROWS: dict[str, tuple[Program, str]] = {
    "method": (models.trained_by_a_method, "'embed' was called from outside of a call"),
    "forward": (models.forward_directly, "'embed' was called from outside of a call"),
}


@pytest.mark.by_day(
    "by_hand_sgd-dp",
    "by_hand_fused-tp",
    "other_model-pp",
    "frozen_parts-dp",
    "frozen_later-zero3",
    "unfrozen_later-tp",
    "model_zero_grad-dp",
    "scheduler_after-dp",
    "accumulate_hooks-tp",
    "retained-dp",
    "not_differentiated-tp",
    "accumulated-dp",
    "evaluated-zero3",
    "no_backward-tp",
    "ddp_after-pp",
    "moved-tp",
    "clipped_by_a_hook-dp",
    "unfrozen_in_steps-zero3",
    "scheduled_by_two-tp",
    "averaged_by_torch-pp",
    "backward_to_some_then_all-dp",
    "written_in_place-dp",
)
@pytest.mark.slow
@pytest.mark.parametrize(("program", "plan"), [*product(RIGHT, PLANS)])
def test_a_habit_gives_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.by_day(
    "twice-dp",
    "recurrent-zero3",
    "paired-tp",
    "asked_beside_inputs-dp",
    "penalty_on_norms-tp",
    "forces-dp",
    "attacked-tp",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plan"), [*product(RIGHT_WITHOUT_PIPELINE, ["dp", "zero3", "tp"])]
)
def test_a_habit_without_a_pipeline_gives_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.by_day("statistics_anew-zero3", "normalized_and_written_in_place-dp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
@pytest.mark.parametrize("program", RIGHT_ON_ROWS)
def test_a_habit_of_batch_norm_gives_the_numbers_of_one_device(
    world2: World, program: Program, plan: str
) -> None:
    right(world2, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", REFUSED)
def test_a_habit_that_could_not_be_right_is_refused(world2: World, case: str, plan: str) -> None:
    program, message = REFUSED[case]
    check(world2, Exception, message, both, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3", "pp"])
@pytest.mark.parametrize("case", REFUSED_ON_ROWS)
def test_training_around_a_call_of_the_model_is_refused(
    world2: World, case: str, plan: str
) -> None:
    program, message = REFUSED_ON_ROWS[case]
    check(world2, ValueError, message, both, program, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_gradients_that_a_program_asks_for_within_no_sync_are_refused(
    world2: World, plan: str
) -> None:
    message = "ask for them outside of no_sync\\(\\), and after its step"
    check(world2, ValueError, message, both, gradients.asked_within_no_sync, PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLANS["pp"], {DP: 2, "batch.gradient_accumulation": 2}])
@pytest.mark.parametrize("program", [gradients.attacked, gradients.encoded_outside])
def test_inputs_that_would_get_no_gradient_are_refused(
    world2: World, program: Program, plan: Constraints
) -> None:
    message = r"batch\['x'\] requires a gradient, .* gives inputs no gradients"
    check(world2, ValueError, message, both, program, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "plan", "message"),
    [
        (gradients.forces, "pp", "forward differentiates what blocks of a pipeline compute"),
        (gradients.forces_in_training, "pp", "forward differentiates what blocks of a pipeline"),
        (gradients.forces_in_training, "accumulated", "differentiate within torch.enable_grad"),
    ],
)
def test_forwards_that_differentiate_say_what_they_meet(
    world2: World, program: Program, plan: str, message: str
) -> None:
    plans = {**PLANS, "accumulated": {DP: 2, "batch.gradient_accumulation": 2}}
    check(world2, ValueError, message, both, program, plans[plan])


@pytest.mark.slow
def test_forwards_may_differentiate_in_micro_batches(world2: World) -> None:
    right(world2, gradients.forces, {DP: 2, "batch.gradient_accumulation": 2})


def _within_a_call_of_another(
    program: Program, constraints: Constraints
) -> tuple[list[Tensor], list[Tensor]]:
    """While another model's DistributedDataParallel calls its module, as one may teach it."""
    vescale.parallelize(make_plan({DP: 2}), nn.Linear(2, 2))  # starts the process group
    with DistributedDataParallel(nn.Linear(2, 2))._inside_ddp_forward():
        return both(program, constraints)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3"])
def test_gradients_are_asked_for_while_another_model_is_called(world2: World, plan: str) -> None:
    for answers in world2.run(
        _within_a_call_of_another, gradients.backward_to_parameters, PLANS[plan]
    ):
        assert_right(answers)
