"""Ranks that share a sequence: the loss, gradients and parameters of one device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale
from vescale_testing import World

from .contexts import ROWS, batch_of, build, rows_of, train
from .experts import Trained, adamw
from .plans import CP, DP, ZERO, Constraints, make_plan
from .test_expert_parallel import compare
from .training import whole


@cache
def on_one_device(family: str, more: tuple[tuple[str, Any], ...]) -> Trained:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(family, None, **dict(more))
    finally:
        torch.set_num_threads(threads)


def check(world: World, plan: Constraints, family: str, **more: Any) -> None:
    """Train under a plan and compare every rank with one device."""
    expected = on_one_device(family, tuple(more.items()))
    given = {"length": 12, "kind": "", "attention": "sdpa", "rows": ROWS, "steps": 3} | more
    compare(world.run(train, family, plan, *given.values()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2", "gemma3_text", "by_hand"])
def test_two_ranks_share_the_sequences_of_a_causal_model(world2: World, family: str) -> None:
    check(world2, {CP: 2}, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_four_ranks_share_sequences_that_they_do_not_divide(world4: World, family: str) -> None:
    check(world4, {CP: 4}, family, length=13)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_share_sequences_and_batches_under_every_stage(world4: World, zero: int) -> None:
    check(world4, {CP: 2, DP: 2, ZERO: zero}, "by_hand", length=9)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_that_share_sequences_share_parameters(world2: World, zero: int) -> None:
    check(world2, {CP: 2, ZERO: zero}, "by_hand", length=9)


@pytest.mark.slow
def test_blocks_run_again_in_backward_on_their_slices(world2: World) -> None:
    check(world2, {CP: 2, ZERO: 3, "recompute": "full"}, "by_hand", length=9)


@pytest.mark.slow
def test_calls_run_in_parts(world2: World) -> None:
    check(world2, {CP: 2, "batch.gradient_accumulation": 2}, "by_hand")


def on_rank_resumed(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Save after two steps under one plan, go on under another; return both ends."""
    ends: list[dict[str, torch.Tensor]] = []
    plans = [{CP: 4, ZERO: 1}, {CP: 2, DP: 2, ZERO: 3}]
    for plan, steps in zip(plans, (range(4), range(2, 4)), strict=True):
        model, optimizer = vescale.parallelize(make_plan(plan), build("by_hand"), adamw)
        state = {"model": model, "optimizer": optimizer}
        if steps.start:
            vescale.load(path, state)
        for step in steps:
            if step == 2 and not steps.start:
                vescale.save(path, state)
            model(**rows_of(model, batch_of(step, 9, ""))).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: whole(p.detach()).clone() for name, p in model.named_parameters()})
    return ends[0], ends[1]


@pytest.mark.slow
def test_checkpoints_are_of_no_number_of_slices(world4: World, tmp_path: Path) -> None:
    for before, after in world4.run(on_rank_resumed, str(tmp_path / "saved")):
        for name, parameter in before.items():
            # AdamW divides by gradients that may be nothing but rounding.
            torch.testing.assert_close(after[name], parameter, rtol=0, atol=1e-10, msg=name)
