"""Ranks that share a sequence in a ring: the loss, gradients and parameters of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vescale
from vescale_testing import World

from .contexts import batch_of, build, rows_of
from .experts import adamw
from .plans import CP, DP, ZERO, Constraints, make_plan
from .test_context_parallel import OTHERS, check
from .training import whole

METHOD = "context_parallel.method"
RING: Constraints = {METHOD: "ring"}
ONE_KEY: tuple[tuple[str, Any], ...] = (("num_key_value_heads", 1), ("num_attention_heads", 2))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "by_hand"])
def test_two_ranks_attend_in_a_ring(world2: World, family: str) -> None:
    check(world2, {CP: 2, **RING}, family)


@pytest.mark.slow
def test_fewer_heads_than_ranks_attend_in_a_ring(world4: World) -> None:
    check(world4, {CP: 4, **RING}, "llama", length=13, more=ONE_KEY)


@pytest.mark.slow
def test_a_ring_shares_batches_and_parameters_too(world4: World) -> None:
    plan = {CP: 2, DP: 2, ZERO: 3, "recompute": "full", **RING}
    check(world4, plan, "by_hand", length=9)


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_ring_goes_with_every_stage(world4: World, zero: int) -> None:
    check(world4, {CP: 2, DP: 2, ZERO: zero, **RING}, "by_hand", length=9)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma3_text"])
def test_four_ranks_of_other_families_attend_in_a_ring(world4: World, family: str) -> None:
    check(world4, {CP: 4, **RING}, family, length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_attention_of_other_kinds_in_a_ring(world2: World, name: str) -> None:
    family, more = OTHERS[name]
    check(world2, {CP: 2, **RING}, family, **more)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted({*OTHERS} - {"as-long-as-heads"}))
def test_attention_of_other_kinds_in_a_ring_of_four(world4: World, name: str) -> None:
    family, more = OTHERS[name]
    check(world4, {CP: 4, **RING}, family, **more)


@pytest.mark.by_day("gemma2", "encoder")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "t5", "encoder"])
def test_what_a_ring_does_not_know_attends_to_keys_of_all_ranks(
    world2: World, family: str
) -> None:
    """Soft caps of scores, biases that are trained, dropout within a function of torch's."""
    attention = "eager" if family == "gemma2" else "sdpa"
    kind = "translation" if family == "t5" else "padded" if family == "gemma2" else ""
    check(world2, {CP: 2, **RING}, family, length=13, kind=kind, attention=attention)


def on_rank_step(plan: Constraints) -> list[Tensor]:
    """Return the loss and gradients of a step."""
    model, _ = vescale.parallelize(make_plan(plan), build("llama"), adamw)
    loss = model(**rows_of(model, batch_of(0, 13, "padded"))).loss
    loss.backward()
    grads: list[Any] = [p.grad for p in model.parameters()]
    return [loss.detach(), *(whole(grad).clone() for grad in grads)]


@pytest.mark.slow
def test_an_emulated_ring_has_the_bits_of_processes(world2: World) -> None:
    plan = {CP: 2, **RING}
    torch.set_num_threads(1)
    [emulated, _] = vescale.emulate(on_rank_step, 2, args=(plan,))
    for made in world2.run(on_rank_step, plan):
        assert all(torch.equal(x, y) for x, y in zip(made, emulated, strict=True))
