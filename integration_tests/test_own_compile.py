"""A program's own torch.compile, of a model or of its blocks, before and after parallelize."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .families import InDouble, make
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .test_bad_input import check as refused

# What all of torch.compile does but make machine code, in a tenth of the time.
QUICK = "aot_eager"

Program = Callable[[nn.Module], nn.Module]

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero1": {DP: 2, ZERO: 1},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "pp": {PP: 2, PARTS: 2},
}


def blocks_of(model: Any) -> nn.ModuleList:
    return model.blocks if hasattr(model, "blocks") else model.model.layers


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=QUICK)  # pyright: ignore[reportReturnType]: a module


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=QUICK)
    return model


def by_block(model: nn.Module) -> nn.Module:
    for block in blocks_of(model):
        block.compile(backend=QUICK)
    return model


def by_block_as_one_graph(model: nn.Module) -> nn.Module:
    for block in blocks_of(model):
        block.compile(backend=QUICK, fullgraph=True)
    return model


def replaced(model: nn.Module) -> nn.Module:
    container: Any = blocks_of(model)
    for index in range(len(container)):
        container[index] = torch.compile(container[index], backend=QUICK)
    return model


def forward_replaced(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=QUICK)
    return model


# Before parallelize, and after; whether its blocks are compiled then.
HABITS: dict[str, tuple[Program, Program, bool]] = {
    "torch.compile(model)": (as_it_is, whole, False),
    "model.compile()": (as_it_is, in_place, False),
    "model.compile(), before": (in_place, as_it_is, False),
    "block.compile()": (as_it_is, by_block, True),
    "block.compile(), before": (by_block, as_it_is, True),
    "block.compile(fullgraph=True)": (as_it_is, by_block_as_one_graph, True),
}
IN_CI = {
    ("torch.compile(model)", "zero3"),
    ("block.compile()", "tp"),
}


def trained(
    family: str, constraints: Constraints | None, before: Program, after: Program
) -> tuple[list[float], list[str], int]:
    """Return losses, warnings of a whole model that is compiled, and how many graphs were made."""
    torch.compiler.reset()
    counted: Any = torch._dynamo.utils.counters
    counted.clear()
    losses = list[float]()
    # With fullgraph torch compiles the mode's own code, and gives a bool for a shape.
    in_double = InDouble() if family == "llama" else contextlib.nullcontext()
    with in_double, warnings.catch_warnings(record=True) as caught:
        # torch warns of what it does not follow.
        warnings.simplefilter("always")
        model, batch = make(family)
        if constraints is not None:
            plan = vescale.generate_plan(
                model, constraints, example_batch=batch, cluster="cpu", world_size=2
            )
            model = after(vescale.parallelize(plan, before(model)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            found = model(**batch)
            loss: Tensor = found if isinstance(found, Tensor) else found.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    told = [str(each.message) for each in caught if "compiles nothing" in str(each.message)]
    return losses, told, counted["stats"]["unique_graphs"]


def assert_right(world: World, family: str, habit: str, plan: str) -> None:
    before, after, compiles = HABITS[habit]
    expected, _, _ = trained(family, None, as_it_is, as_it_is)
    for losses, told, graphs in world.run(trained, family, PLANS[plan], before, after):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert len(told) == (not compiles)
        assert (graphs > 0) == compiles


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("habit", "plan"), sorted(IN_CI))
def test_a_compiled_model_has_the_losses_of_one_device(
    world2: World, habit: str, plan: str
) -> None:
    assert_right(world2, "nanogpt", habit, plan)


BY_NIGHT = [
    (family, habit, plan)
    for family in ("nanogpt", "llama")
    for habit in HABITS
    for plan in PLANS
    if (habit, plan) not in IN_CI or family != "nanogpt"
    if "fullgraph" not in habit or family == "nanogpt"
]


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "habit", "plan"), BY_NIGHT)
def test_so_it_has_of_every_habit_and_plan(
    world2: World, family: str, habit: str, plan: str
) -> None:
    assert_right(world2, family, habit, plan)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (replaced, "'blocks.0' was replaced by what torch.compile made of it"),
        (forward_replaced, "forward of the parallelized HandWritten was replaced by what"),
    ],
)
@pytest.mark.parametrize("plan", ["zero3", "pp"])
def test_what_has_other_names_then_is_refused(
    world2: World, after: Program, message: str, plan: str
) -> None:
    refused(world2, ValueError, message, trained, "nanogpt", PLANS[plan], as_it_is, after)
