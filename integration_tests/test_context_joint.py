"""Ranks that share a sequence which attends together with another one, of text or of prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import vescale
from vescale_testing import World

from .contexts import batch_of, build
from .families import InDouble
from .joint_attention import ATTENTION, BY_HAND, TEXT
from .plans import CP, DP, PP, TP, ZERO, Constraints, make_plan
from .test_compile_context import check as check_compiled
from .test_context_parallel import check
from .test_context_written_out import METHOD, on_rank_evaluated, same
from .training import whole


@pytest.mark.by_day("prefixed", "registers")
@pytest.mark.slow
@pytest.mark.parametrize("family", [*BY_HAND, *ATTENTION])
def test_two_sequences_attend_together_as_on_one_device(world2: World, family: str) -> None:
    check(world2, {CP: 2}, family, length=13)


@pytest.mark.by_day("single-more2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mixed", {DP: 2, ZERO: 3}),
        ("double", {PP: 2}),
        ("single", {TP: 2}),
        ("double", {DP: 2, ZERO: 2, "recompute": "full"}),
        ("registers", {TP: 2}),
        ("mixed", {METHOD: "ring", DP: 2}),
    ],
)
def test_besides_other_axes(world4: World, family: str, more: Constraints) -> None:
    check(world4, {CP: 2, **more}, family, length=13)


@pytest.mark.by_day("ring")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_to_all", "ring"])
def test_four_ranks_share_what_is_as_long_as_the_text(world4: World, method: str) -> None:
    check(world4, {CP: 4, METHOD: method}, "mixed", length=8)


def check_alone(world: World, on_rank: Callable[..., list[Tensor]], family: str) -> None:
    """Compare what every rank returns under context parallelism with what one device does."""
    expected = on_rank(family, {})
    for found in world.run(on_rank, family, {CP: 2}):
        for x, alone in zip(found, expected, strict=True):
            same(x, alone)


def on_rank_of_lengths(family: str, plan: Constraints) -> list[Tensor]:
    """Return losses of sequences of other lengths, one as long as the text, and gradients."""
    model: Any = build(family)
    if plan:
        model = vescale.parallelize(make_plan(plan), model)
    losses = list[Tensor]()
    with InDouble():
        for step, length in enumerate((13, TEXT, 9, 2 * TEXT)):
            losses.append(model(**batch_of(step, length, "")))
            losses[-1].backward()
    return [x.detach() for x in losses] + [whole(p.grad) for p in model.parameters()]


@pytest.mark.by_day("mixed", "shifted")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixed", "shifted", "registers"])
def test_sequences_of_other_lengths(world2: World, family: str) -> None:
    check_alone(world2, on_rank_of_lengths, family)


@pytest.mark.by_day("prefixed")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["prefixed", "mixed"])
def test_evaluation_is_that_of_one_device(world2: World, family: str) -> None:
    check_alone(world2, on_rank_evaluated, family)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("family", ["double", "registers"])
def test_blocks_are_compiled_around_attention(world2: World, family: str) -> None:
    check_compiled(world2, family, {CP: 2}, (13, 9, 12))
