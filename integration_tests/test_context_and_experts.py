"""Ranks that share sequences and experts: the loss, gradients and parameters of one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale
from vescale_parallel import expert_load
from vescale_testing import World

from .contexts import batch_of, build, rows_of
from .experts import adamw
from .families import InDouble
from .plans import CP, DP, EP, TP, ZERO, Constraints, make_plan
from .test_context_parallel import check
from .training import whole

METHOD = "context_parallel.method"
METHODS = ["all_to_all", "ring"]
BALANCED: tuple[tuple[str, Any], ...] = (
    ("output_router_logits", True),
    ("router_aux_loss_coef", 0.1),
)


@pytest.mark.slow
def test_sequences_and_experts_are_shared_by_the_same_ranks(world2: World) -> None:
    check(world2, {CP: 2, EP: 2, ZERO: 3}, "mixtral", length=13, more=BALANCED)


@pytest.mark.nightly
@pytest.mark.slow
def test_tokens_of_several_sequences_go_to_experts(world4: World) -> None:
    plan = {CP: 2, DP: 2, EP: 2, ZERO: 3, METHOD: "ring"}
    check(world4, plan, "deepseek_v3", length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_ranks_that_share_sequences_share_experts(world2: World, family: str, method: str) -> None:
    check(world2, {CP: 2, EP: 2, METHOD: method}, family, length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_ranks_of_several_sequences_share_experts(world4: World, family: str, method: str) -> None:
    check(world4, {CP: 2, DP: 2, EP: 2, METHOD: method}, family, length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("cp", "dp", "ep"), [(2, 2, 2), (2, 2, 4), (4, 1, 2)])
def test_every_stage_has_shared_experts(
    world4: World, cp: int, dp: int, ep: int, zero: int
) -> None:
    check(world4, {CP: cp, DP: dp, EP: ep, ZERO: zero}, "qwen3_moe", length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_balancing_losses_are_those_of_whole_sequences(
    world2: World, family: str, method: str
) -> None:
    check(world2, {CP: 2, EP: 2, METHOD: method}, family, length=13, more=BALANCED)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_balancing_losses_are_those_of_the_global_batch(world4: World, family: str) -> None:
    check(world4, {CP: 2, DP: 2, EP: 2, ZERO: 3}, family, length=13, more=BALANCED)


@pytest.mark.nightly
def test_padded_tokens_are_left_out_of_balancing_losses(world4: World) -> None:
    plan = {CP: 2, DP: 2, EP: 2, METHOD: "ring"}
    check(world4, plan, "mixtral", length=13, kind="padded", more=BALANCED)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_scores_that_blocks_return_are_of_whole_sequences(world2: World, method: str) -> None:
    check(world2, {CP: 2, EP: 2, ZERO: 1, METHOD: method}, "experts_by_hand", length=13)


@pytest.mark.nightly
def test_scores_that_blocks_return_are_of_the_global_batch(world4: World) -> None:
    check(world4, {CP: 2, DP: 2, EP: 4, ZERO: 2}, "experts_by_hand", length=13)


def on_rank_with_states(plan: Constraints | None) -> list[torch.Tensor]:
    """Return what a model returns of each of its layers, for two lengths."""
    model: Any = build("qwen3_moe")
    if plan is not None:
        model = vescale.parallelize(make_plan(plan), model)
    made = list[torch.Tensor]()
    for length in (12, 15):
        batch = rows_of(model, batch_of(0, length, ""))
        with InDouble(), torch.no_grad():
            output = model(**batch, output_hidden_states=True, output_router_logits=False)
        made += output.hidden_states
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_states_of_layers_are_of_whole_sequences(world2: World, method: str) -> None:
    expected = on_rank_with_states(None)
    for found in world2.run(on_rank_with_states, {CP: 2, METHOD: method}):
        for x, whole_x in zip(found, expected, strict=True):
            torch.testing.assert_close(x, whole_x, rtol=1e-12, atol=1e-12)


def on_rank_with_recomputation(recompute: str) -> list[torch.Tensor]:
    """Return a loss and gradients; the model's own float32 stays, which is compared alike."""
    plan = {CP: 2, EP: 2, ZERO: 3, "recompute": recompute}
    model: Any = vescale.parallelize(make_plan(plan), build("qwen3_moe", **dict(BALANCED)))
    loss = model(**batch_of(0, 13, "")).loss
    loss.backward()
    grads: list[Any] = [p.grad for p in model.parameters()]
    return [loss.detach(), *(whole(grad).clone() for grad in grads)]


@pytest.mark.nightly
def test_blocks_with_experts_run_again_in_backward(world2: World) -> None:
    again = world2.run(on_rank_with_recomputation, "full")
    for found, expected in zip(again, world2.run(on_rank_with_recomputation, "none"), strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.nightly
def test_calls_with_experts_run_in_parts(world2: World) -> None:
    check(world2, {CP: 2, EP: 2, "batch.gradient_accumulation": 2}, "olmoe", length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("length", [3, 4])
def test_short_sequences_are_not_sliced(world2: World, length: int) -> None:
    check(world2, {CP: 2, EP: 2}, "olmoe", length=length)


@pytest.mark.nightly
def test_experts_of_the_sequence_go_with_cut_layers(world4: World) -> None:
    # What eager experts compute is told by values, with which no plan is compared.
    more = {"more": (("experts", "batched_mm"),)}
    check(world4, {CP: 2, EP: 2, TP: 2}, "qwen3_moe", length=13, **more)


def on_rank_with_load(
    plan: Constraints, family: str = "qwen3_moe", lengths: Sequence[int] = (13,)
) -> dict[str, list[int]]:
    """Return how many tokens each expert got in a step."""
    model: Any = vescale.parallelize(make_plan(plan), build(family))
    with InDouble():
        for length in lengths:
            output = model(**rows_of(model, batch_of(0, length, "")))
            (output if isinstance(output, torch.Tensor) else output.loss).backward()
    return {name: counts.tolist() for name, counts in expert_load(model).items()}


@pytest.mark.nightly
def test_load_counts_every_token_once(world4: World) -> None:
    by_others = world4.run(on_rank_with_load, {DP: 4, EP: 4})
    found = world4.run(on_rank_with_load, {CP: 2, DP: 2, EP: 4})
    assert found == by_others
    assert {sum(counts) for counts in found[0].values()} == {4 * 13 * 2}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["experts_by_hand", "qwen3_moe"])
def test_load_counts_tokens_of_short_sequences_once(world2: World, family: str) -> None:
    # Three positions are not sliced for two ranks, each of which has all of them.
    found = world2.run(on_rank_with_load, {CP: 2, EP: 2}, family, (3, 13))
    assert {sum(counts) for counts in found[0].values()} == {4 * (3 + 13) * 2}


def on_rank_resumed(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Save after two steps under one plan, go on under another; return both ends."""
    ends: list[dict[str, torch.Tensor]] = []
    plans = [{CP: 4, EP: 2, ZERO: 3}, {CP: 2, DP: 2, EP: 4, ZERO: 1}]
    for plan, steps in zip(plans, (range(4), range(2, 4)), strict=True):
        model, optimizer = vescale.parallelize(make_plan(plan), build("qwen3_moe"), adamw)
        state = {"model": model, "optimizer": optimizer}
        if steps.start:
            vescale.load(path, state)
        for step in steps:
            if step == 2 and not steps.start:
                vescale.save(path, state)
            with InDouble():
                model(**rows_of(model, batch_of(step, 13, ""))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: whole(p.detach()).clone() for name, p in model.named_parameters()})
    return ends[0], ends[1]


@pytest.mark.nightly
def test_checkpoints_are_of_no_number_of_ranks(world4: World, tmp_path: Path) -> None:
    for before, after in world4.run(on_rank_resumed, str(tmp_path / "saved")):
        for name, parameter in before.items():
            # AdamW divides by gradients that may be nothing but rounding.
            torch.testing.assert_close(after[name], parameter, rtol=0, atol=1e-10, msg=name)
