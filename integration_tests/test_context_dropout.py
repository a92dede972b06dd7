"""Dropout in blocks of ranks that share sequences: one device's masks, and its generator."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .contexts import Block, ByHand, batch_of, build, rows_of
from .experts import adamw
from .families import InDouble
from .plans import CP, DP, TP, ZERO, Constraints, make_plan
from .training import whole

METHOD = "context_parallel.method"
_GPT2 = (("resid_pdrop", 0.2), ("embd_pdrop", 0.1), ("attn_pdrop", 0.3))
_BERT = (("hidden_dropout_prob", 0.2), ("attention_probs_dropout_prob", 0.3))
_HEADS = (("num_attention_heads", 6), ("num_key_value_heads", 3), ("hidden_size", 48))
# Family, attention, and more of its configuration.
MODELS: dict[str, tuple[str, str, tuple[tuple[str, Any], ...]]] = {
    "gpt2": ("gpt2", "sdpa", _GPT2),
    "gpt2-eager": ("gpt2", "eager", _GPT2),
    "bert": ("bert", "sdpa", _BERT),
    "bert-eager": ("bert", "eager", _BERT),
    "grouped-eager": ("llama", "eager", (("attention_dropout", 0.3), *_HEADS)),
    "grouped": ("llama", "sdpa", (("attention_dropout", 0.3), *_HEADS)),
    "bart": ("bart", "sdpa", (("dropout", 0.2), ("attention_dropout", 0.1))),
    "t5": ("t5", "eager", (("dropout_rate", 0.2),)),
    "bloom": ("bloom", "eager", (("hidden_dropout", 0.2), ("attention_dropout", 0.2))),
    "sinks": ("gpt_oss", "eager", (("attention_dropout", 0.3),)),
    "by_hand": ("by_hand", "sdpa", ()),
}


class DropoutBlock(Block):
    """A block whose forward draws itself, in attention, and for rows as (rows * positions)."""

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        rows, length, features = x_BSF.shape
        q, k, v = (
            each.view(rows, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.norm(x_BSF)).chunk(3, -1)
        )
        q, k = (x * cos_SD + x.roll(1, -1) * sin_SD for x in (q, k))
        rate = 0.2 if self.training else 0.0
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        mixed_BSF = made.transpose(1, 2).reshape(rows, length, features)
        x_BSF = x_BSF + F.dropout(self.out(mixed_BSF), 0.3, self.training)
        rows_NF = self.down(F.gelu(self.up(self.norm2(x_BSF).flatten(0, 1))))
        return x_BSF + F.dropout(rows_NF, 0.2, self.training).view_as(x_BSF)


def _model(name: str) -> nn.Module:
    family, attention, more = MODELS[name]
    model = build(family, attention, **dict(more))
    if isinstance(model, ByHand):
        torch.manual_seed(1)
        model.blocks = nn.ModuleList(DropoutBlock() for _ in range(2)).double()
    return model.train()


def on_rank(name: str, plan: Constraints | None, length: int) -> tuple[list[Tensor], Tensor]:
    """Return losses and gradients of two steps, and the generator's state behind them."""
    model: Any = _model(name)
    torch.manual_seed(3)
    if plan is not None:
        model, _ = vescale.parallelize(make_plan(plan), model, adamw)
    found: list[Tensor] = []
    for step in range(2):
        with InDouble():
            output = model(**rows_of(model, batch_of(step, length + step, "")))
            loss = output if isinstance(output, Tensor) else output.loss
            loss.backward()
        found.append(loss.detach())
    grads: list[Any] = [p.grad for p in model.parameters()]
    found += [whole(grad).clone() for grad in grads if grad is not None]
    return found, torch.get_rng_state()


@cache
def _on_one_device(name: str, length: int) -> tuple[list[Tensor], Tensor]:
    [expected] = vescale.emulate(on_rank, 1, args=(name, None, length))
    return expected


def check(world: World, name: str, plan: Constraints, length: int = 13) -> None:
    expected, state = _on_one_device(name, length)
    for found, end in world.run(on_rank, name, plan, length):
        for x, y in zip(found, expected, strict=True):
            # Float64; slices add gradients up in another order than one device.
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12 * max(1.0, float(y.abs().max())))
        assert torch.equal(end, state)
        assert not torch.equal(end, torch.Generator().manual_seed(3).get_state())


@pytest.mark.by_day("by_hand-all_to_all", "by_hand-ring")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_to_all", "ring"])
@pytest.mark.parametrize("name", ["gpt2", "bert-eager", "by_hand"])
def test_blocks_draw_one_devices_masks_on_slices(world2: World, name: str, method: str) -> None:
    check(world2, name, {CP: 2, METHOD: method})


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{TP: 2}, {TP: 2, CP: 2}], ids=str)
def test_heads_that_are_dealt_out_draw_their_masks(
    world2: World, world4: World, plan: Constraints
) -> None:
    """Two ranks have the first and the second query head of each of three key heads."""
    check(world4 if CP in plan else world2, "grouped", plan)


@pytest.mark.slow
def test_blocks_draw_again_in_backward(world4: World) -> None:
    check(world4, "by_hand", {CP: 2, DP: 2, ZERO: 3, "recompute": "full"})


def on_rank_refused() -> str:
    model, _ = vescale.parallelize(make_plan({CP: 2}), build("gpt2").train(), adamw)
    batch = batch_of(0, 12, "")
    model(**batch)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    with pytest.raises(ValueError, match="context_parallel") as error:
        model(**batch)
    return str(error.value)


@pytest.mark.slow
def test_dropout_that_is_set_later_is_refused(world2: World) -> None:
    for said in world2.run(on_rank_refused):
        assert "'transformer.h' drew random numbers, which it did not when" in said


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["all_to_all", "ring"])
@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_draw_one_devices_masks(world4: World, name: str, method: str) -> None:
    check(world4, name, {CP: 4, METHOD: method})


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["all_to_all", "ring"])
@pytest.mark.parametrize("more", [{DP: 2}, {"batch.gradient_accumulation": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_masks_are_one_devices_of_parts_of_a_batch(
    world2: World, world4: World, name: str, more: Constraints, method: str
) -> None:
    world = world4 if DP in more else world2
    check(world, name, {CP: 2, METHOD: method, **more})


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["all_to_all", "ring"])
@pytest.mark.parametrize(
    "more", [{TP: 2}, {DP: 2, "recompute": "full"}, {"recompute": "full"}], ids=str
)
# Of norms that compute in float32 blocks that run again do so, and are not compared to 1e-12.
@pytest.mark.parametrize("name", ["gpt2", "gpt2-eager", "bert", "bert-eager", "by_hand"])
def test_masks_are_one_devices_under_other_plans(
    world2: World, world4: World, name: str, more: Constraints, method: str
) -> None:
    world = world4 if TP in more or DP in more else world2
    check(world, name, {CP: 2, METHOD: method, **more})
