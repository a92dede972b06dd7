"""Stages whose ranks share sequences: the loss, gradients and parameters of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vescale
from vescale_parallel import explain
from vescale_testing import World

from .contexts import batch_of, build, rows_of
from .families import InDouble
from .plans import CP, EP, PARTS, PP, SCHEDULE, VIRTUAL, ZERO, Constraints, make_plan
from .test_context_dropout import check as compare_draws
from .test_context_parallel import check

METHOD = "context_parallel.method"
METHODS = ["all_to_all", "ring"]
STAGES: Constraints = {CP: 2, PP: 2, PARTS: 2}


@pytest.mark.slow
def test_what_crosses_a_cut_is_a_slice(world4: World) -> None:
    check(world4, {**STAGES, ZERO: 1}, "gpt2", length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "by_hand"])
def test_stages_of_a_family_run_on_slices(world4: World, family: str, method: str) -> None:
    check(world4, {**STAGES, METHOD: method}, family, length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_stages_of_slices_share_parameters(world4: World, zero: int) -> None:
    check(world4, {**STAGES, ZERO: zero}, "by_hand", length=13)


SCHEDULES: dict[str, Constraints] = {
    "gpipe": {SCHEDULE: "gpipe", METHOD: "ring"},
    "interleaved": {SCHEDULE: "interleaved_1f1b", VIRTUAL: 2},
    "looped": {SCHEDULE: "looped_bfs", VIRTUAL: 2, METHOD: "ring"},
    "zero-bubble": {SCHEDULE: "interleaved_zero_bubble", METHOD: "ring"},
    "v": {SCHEDULE: "zbv", VIRTUAL: 2},
    "dual": {SCHEDULE: "dualpipev", VIRTUAL: 2, PARTS: 4, METHOD: "ring"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_on_slices(world4: World, schedule: str) -> None:
    more = (("num_hidden_layers", 4),)
    check(world4, {**STAGES, **SCHEDULES[schedule]}, "llama", length=13, steps=2, more=more)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "by_hand"])
@pytest.mark.parametrize("method", METHODS)
def test_stages_draw_masks_of_one_device(world4: World, name: str, method: str) -> None:
    compare_draws(world4, name, {CP: 2, PP: 2, METHOD: method})


@pytest.mark.nightly
def test_stages_run_short_sequences_whole(world4: World) -> None:
    check(world4, STAGES, "llama", length=3)


@pytest.mark.nightly
def test_stages_share_sequences_and_experts(world4: World) -> None:
    more = (("experts", "batched_mm"),)
    check(world4, {**STAGES, EP: 2}, "qwen3_moe", length=13, steps=1, more=more)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_masks_are_those_of_whole_sequences_on_every_stage(world4: World, kind: str) -> None:
    check(world4, {**STAGES, METHOD: "ring"}, "mistral", length=13, kind=kind)


@pytest.mark.nightly
def test_gradients_of_stages_are_reduced_by_micro_batch(world4: World) -> None:
    plan = {**STAGES, ZERO: 2, "pipeline_parallel.reduce_every": "microbatch"}
    check(world4, plan, "by_hand", length=13)


def on_rank_evaluated(plan: Constraints | None) -> list[torch.Tensor]:
    """Return logits of two lengths, without gradients, and the bytes that a step sends by pp."""
    model: Any = build("llama").eval()
    if plan is not None:
        model = vescale.parallelize(make_plan(plan), model)
    with InDouble(), torch.no_grad():
        return [model(input_ids=batch_of(0, n, "")["input_ids"]).logits for n in (12, 15)]


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_stages_evaluate_slices(world4: World, method: str) -> None:
    expected = on_rank_evaluated(None)
    for found in world4.run(on_rank_evaluated, {**STAGES, METHOD: method}):
        for x, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(x, whole, rtol=1e-12, atol=1e-12)


def on_rank_counted(plan: Constraints) -> int:
    """Return the bytes of activations and gradients that this rank sends to other stages."""
    model: Any = vescale.parallelize(make_plan(plan), build("by_hand"))
    model(**rows_of(model, batch_of(0, 12, ""))).backward()  # tells the forms of messages
    with explain(model) as found:
        model(**rows_of(model, batch_of(0, 12, ""))).backward()
    return sum(each.nbytes for each in found.axes if each.what in _SENT)


_SENT = ("send activations", "send gradients")


@pytest.mark.nightly
def test_a_cut_is_crossed_by_a_fraction_of_the_bytes(world4: World, world2: World) -> None:
    alone = world2.run(on_rank_counted, {PP: 2, PARTS: 2})
    shared = world4.run(on_rank_counted, STAGES)
    assert alone == [4 * 12 * 32 * 8] * 2
    assert shared == [4 * 6 * 32 * 8] * 4
