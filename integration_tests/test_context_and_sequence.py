"""Ranks that share sequences, of slices that are sharded between layers: one device's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from torch import Tensor

import vescale
from vescale_testing import World

from . import test_compile_context, test_context_dropout, test_hooks
from .contexts import batch_of, build
from .plans import CP, DP, EP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .test_context_parallel import check

BOTH: Constraints = {CP: 2, TP: 2, SEQUENCE: True}
RING: Constraints = {"context_parallel.method": "ring"}
AGAIN: Constraints = {"recompute": "full"}
# 13 positions are slices of 7 and 6, and parts of 4, 3, 3 and 3 of these.
LENGTH = 13
# Of the others, attention is written out: their modules are shown whole sequences.
SDPA = ("mistral", "qwen3", "gemma3_text", "bert", "t5", "bart")
EAGER = ("gpt2", "gemma2", "bloom", "gptj", "mpt", "deberta-v2", "bert")
EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")


@pytest.fixture(scope="module")
def world8() -> Iterator[World]:
    world = World(8)
    yield world
    world.close()


@pytest.mark.by_day("plan0-llama", "plan1-gpt2")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("plan", [{}, RING, {ZERO: 3}])
def test_slices_are_sharded_between_layers(world4: World, plan: Constraints, family: str) -> None:
    check(world4, {**BOTH, **plan}, family, length=LENGTH)


@pytest.mark.by_day("t5")
@pytest.mark.slow
@pytest.mark.parametrize("family", SDPA)
def test_slices_of_families_are_sharded(world4: World, family: str) -> None:
    check(world4, BOTH, family, length=LENGTH)


@pytest.mark.by_day("bloom")
@pytest.mark.slow
@pytest.mark.parametrize("family", EAGER)
def test_modules_that_see_whole_sequences_return_parts(world4: World, family: str) -> None:
    check(world4, BOTH, family, length=LENGTH, attention="eager")


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [{}, {EP: 2}], ids=str)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_given_parts(world4: World, family: str, plan: Constraints) -> None:
    more = (("experts", "batched_mm"),)
    check(world4, {**BOTH, **plan}, family, length=LENGTH, more=more)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [{}, RING, AGAIN], ids=str)
@pytest.mark.parametrize("kind", ["padded", "packed", "translation"])
def test_masks_of_parts(world4: World, kind: str, plan: Constraints) -> None:
    family = "bart" if kind == "translation" else "gpt2"
    check(world4, {**BOTH, **plan}, family, length=LENGTH, kind=kind)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [{}, RING], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_are_sent_parts(world8: World, family: str, plan: Constraints) -> None:
    """Sequences of a length that all divide: the other steps have one position more."""
    check(world8, {**BOTH, PP: 2, PARTS: 2, **plan}, family, length=16, steps=1)


@pytest.mark.nightly
def test_slices_of_several_batches_are_sharded(world8: World) -> None:
    check(world8, {**BOTH, DP: 2, ZERO: 3}, "gpt2", length=LENGTH)


@pytest.mark.by_day("gpt2-eager-plan1")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, RING, AGAIN])
@pytest.mark.parametrize(
    "name", ["gpt2", "gpt2-eager", "bert", "bert-eager", "bart", "t5", "bloom"]
)
def test_parts_draw_one_devices_masks(world4: World, name: str, plan: Constraints) -> None:
    test_context_dropout.check(world4, name, {**BOTH, **plan})


@pytest.mark.slow
def test_short_sequences_are_sharded_by_layers_alone(world4: World) -> None:
    """Of 3 positions, and in the next step of 4, which are enough to be sliced."""
    check(world4, BOTH, "gpt2", length=3)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_blocks_of_parts_are_compiled(world4: World, kind: str) -> None:
    test_compile_context.check(world4, kind, BOTH)


@cache
def _hooked(kind: str) -> str:
    model, call = test_hooks.Run(kind=kind, plan=None).build()
    return vescale.generate_plan(model, BOTH, world_size=4, example_batch=call).to_json()


@pytest.mark.by_day("llama-reading")
@pytest.mark.slow
@pytest.mark.parametrize("program", test_hooks.PROGRAMS)
@pytest.mark.parametrize("kind", ["llama", "nanogpt"])
def test_hooks_see_whole_sequences(world4: World, kind: str, program: test_hooks.Program) -> None:
    test_hooks.check(world4, program, kind, _hooked(kind))


def on_rank_seen() -> list[int]:
    """Return how many positions the second block is given, and how many it attends with."""
    model: Any = vescale.parallelize(make_plan(BOTH), build("llama"))
    seen, block = list[int](), model.model.layers[1]
    for module in (block.input_layernorm, block.self_attn.q_proj):
        own = module.forward  # a hook is given all positions

        def forward(x_BSF: Tensor, own: Any = own) -> Any:
            seen.append(x_BSF.shape[1])
            return own(x_BSF)

        module.forward = forward
    model(**batch_of(0, LENGTH, "")).loss.backward()
    return seen


@pytest.mark.slow
def test_between_layers_a_rank_has_a_part_of_its_slice(world4: World) -> None:
    assert world4.run(on_rank_seen) == [[4, 7], [3, 7], [3, 6], [3, 6]]
