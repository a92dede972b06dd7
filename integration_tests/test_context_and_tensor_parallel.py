"""Ranks that share sequences, of layers that are cut: the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest

from vescale_testing import World

from .plans import CP, TP, ZERO, Constraints
from .test_context_parallel import check

RING: Constraints = {"context_parallel.method": "ring"}
# One head of keys, of which both tensor-parallel ranks have copies.
ONE_KEY: dict[str, Any] = {"more": (("num_key_value_heads", 1),)}


@pytest.mark.by_day("llama")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_heads_are_cut_and_then_shared_out(world4: World, family: str) -> None:
    check(world4, {CP: 2, TP: 2}, family, length=13)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_ring_of_cut_layers_and_sharded_parameters(world4: World) -> None:
    check(world4, {CP: 2, TP: 2, ZERO: 3, **RING}, "llama", length=13, **ONE_KEY)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [{}, {ZERO: 1}, {ZERO: 3}, RING], ids=str)
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "by_hand"])
def test_other_families_are_cut_and_shared_out(
    world4: World, family: str, plan: Constraints
) -> None:
    check(world4, {CP: 2, TP: 2, **plan}, family, length=13)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [{}, RING], ids=str)
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_masks_of_cut_layers_that_are_shared_out(
    world4: World, kind: str, plan: Constraints
) -> None:
    check(world4, {CP: 2, TP: 2, **plan}, "llama", length=13, kind=kind)


@pytest.mark.nightly
def test_cut_blocks_run_again_on_their_slices(world4: World) -> None:
    check(world4, {CP: 2, TP: 2, "recompute": "full"}, "by_hand", length=13)
