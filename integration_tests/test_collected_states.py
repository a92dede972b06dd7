"""Hidden states that transformers' hooks collect for the model's own forward, as LLaVA's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import parallelize
from vescale_testing import World

from .families import InDouble
from .plans import PARTS, PP, Constraints, make_plan
from .training import whole
from .vision_language import batch_of, build, with_labels

ACCUMULATION = "batch.gradient_accumulation"


def steps(
    constraints: Constraints | vescale.ParallelPlan | None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two steps, and the gradients of the second."""
    model: Any = build()
    if constraints is not None:
        is_made = isinstance(constraints, vescale.ParallelPlan)
        model = parallelize(constraints if is_made else make_plan(constraints), model)
    losses: list[float] = []
    for step in range(2):
        model.zero_grad()
        with InDouble():
            loss = model(**with_labels(batch_of(step))).loss
            loss.backward()
        losses.append(float(whole(loss)))
    trained = ((fqn, p.grad) for fqn, p in model.named_parameters() if p.grad is not None)
    return losses, {fqn: whole(grad) for fqn, grad in trained}


def planned() -> tuple[list[float], dict[str, Tensor]]:
    """The same under a plan that was made of a batch with images, and is carried out without."""
    batch = with_labels(batch_of(0))
    plan = vescale.generate_plan(build(), {PP: 2, PARTS: 2}, world_size=2, example_batch=batch)
    assert any("vision_tower" in fqn for fqn in plan.pipeline_parallel.called_behind)
    return steps(plan)


def same(found: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, gradients = found
    expected, own = steps(None)
    torch.testing.assert_close(losses, expected)
    # Of the tower's last layer nothing is taken.
    assert {fqn for fqn, grad in gradients.items() if grad.any()} == {
        fqn for fqn, grad in own.items() if grad.any()
    }
    for fqn, gradient in own.items():
        if gradient.any():
            torch.testing.assert_close(gradients[fqn], gradient, msg=fqn)


@pytest.mark.slow
def test_stages_have_the_states_that_earlier_ones_collected(world2: World) -> None:
    for found in world2.run(steps, {PP: 2, PARTS: 2}):
        same(found)


@pytest.mark.slow
def test_stages_are_those_of_the_plans_example(world2: World) -> None:
    for found in world2.run(planned):
        same(found)


def test_states_are_collected_once_in_each_run_of_forward(world1: World) -> None:
    for found in world1.run(steps, {ACCUMULATION: 2}):
        same(found)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def added_hooks() -> list[int]:
    """Return how many more hooks than one device's a model has, before two steps and after."""
    alone = build()
    model: Any = parallelize(make_plan({ACCUMULATION: 2}), build())
    before = hooks_of(model) - hooks_of(alone)
    with InDouble():
        alone(**with_labels(batch_of(0)))
        for step in range(2):
            model(**with_labels(batch_of(step))).loss.backward()
    return [before, hooks_of(model) - hooks_of(alone)]


def test_hooks_that_forward_adds_stay_behind_the_call_once(world1: World) -> None:
    for before, after in world1.run(added_hooks):
        assert after == before


def evaluated() -> None:
    """Check the rows of a form of call that is new, after the tower was given its hooks."""
    model: Any = vescale.parallelize(make_plan({"data_parallel.size": 2}), build())
    part = vescale.data_parallel_rank(model)
    for step in range(2):
        given = with_labels(batch_of(step)) if step == 0 else batch_of(step)
        given = {name: tensor.chunk(2)[part] for name, tensor in given.items()}
        with InDouble(), torch.no_grad():
            model(**given)


@pytest.mark.slow
def test_rows_are_checked_behind_calls_that_added_hooks(world2: World) -> None:
    world2.run(evaluated)  # a check that cannot be made is warned of
