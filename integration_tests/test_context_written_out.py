"""Ranks that share sequences of models that write attention out, or have a second sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_testing import World

from .contexts import Block, ByHand, batch_of, build
from .experts import adamw
from .families import InDouble
from .matrix import verified
from .plans import CP, DP, PP, TP, ZERO, Constraints, make_plan
from .test_bad_input import check as refused
from .test_compile_context import check as check_compiled
from .test_context_parallel import check
from .training import whole
from .written_attention import BY_HAND

METHOD = "context_parallel.method"
EAGER = ("bloom", "gptj", "mpt", "deberta-v2")  # have no other attention


def check_any(world: World, plan: Constraints, family: str, kind: str = "") -> None:
    """Compare 13 positions, which no number of ranks divides; an encoder's besides a decoder's."""
    kind = "translation" if family in ("t5", "bart", "translator") else kind
    attention = "eager" if family in EAGER else "sdpa"
    # AdamW divides gradients of T5 that are nearly nothing, so that rounding grows in every step.
    steps = 2 if family == "t5" else 3
    check(world, plan, family, length=13, kind=kind, attention=attention, steps=steps)


def same(x: Tensor, alone: Tensor) -> None:
    """Compare in float64 with one device, which sums in another order than ranks do."""
    torch.testing.assert_close(x, alone, rtol=0, atol=1e-12 * float(alone.abs().max()))


@pytest.mark.by_day("with_buffer", "dropping", "by_einsum", "of_kernels")
@pytest.mark.slow
@pytest.mark.parametrize("family", [*BY_HAND])
def test_models_by_hand_train_as_on_one_device(world2: World, family: str) -> None:
    check_any(world2, {CP: 2}, family)


@pytest.mark.by_day("mpt", "deberta-v2")
@pytest.mark.slow
@pytest.mark.parametrize("family", EAGER)
def test_families_that_write_attention_out(world2: World, family: str) -> None:
    check_any(world2, {CP: 2}, family, "padded")


@pytest.mark.by_day("bart")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart", "translator"])
def test_decoders_read_what_encoders_return(world4: World, family: str) -> None:
    check_any(world4, {CP: 4}, family)
    check(world4, {CP: 4}, family, length=13)  # both sequences are of one length by chance


@pytest.mark.by_day("dropping-more6")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("with_buffer", {DP: 2, ZERO: 3}),
        ("bloom", {DP: 2, ZERO: 2}),
        ("gptj", {TP: 2}),
        ("with_buffer", {TP: 2}),
        ("t5", {DP: 2, ZERO: 3}),
        ("bart", {TP: 2}),
        ("dropping", {PP: 2}),
        ("encoder", {DP: 2, "recompute": "full"}),
    ],
)
def test_besides_other_axes(world4: World, family: str, more: Constraints) -> None:
    check_any(world4, {CP: 2, **more}, family)


@pytest.mark.by_day("with_buffer", "dropping", "bloom")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["with_buffer", "dropping", "bloom", "bart"])
def test_slices_of_a_ring(world2: World, family: str) -> None:
    check_any(world2, {CP: 2, METHOD: "ring"}, family)


DEEP = (("num_hidden_layers", 6), ("vocab_size", 140_000))
DROPPING = (("n_layer", 6), ("vocab_size", 140_000), ("resid_pdrop", 0.1), ("attn_pdrop", 0.1))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", DEEP),
        ("bloom", DEEP),
        ("gpt2", DROPPING),
        ("qwen3_moe", DEEP),
    ],
)
def test_models_of_more_blocks_than_are_compared(world2: World, family: str, more: Any) -> None:
    attention = "eager" if family in EAGER else "sdpa"
    check(world2, {CP: 2}, family, length=13, attention=attention, steps=2, more=more)


class Steered(Block):
    """A block that is another function of long sequences, and by a flag."""

    pools = False

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        made = super().forward(x_BSF, cos_SD, sin_SD)
        if x_BSF.shape[1] > 20:
            made = made * 2
        return made + made.mean(1, keepdim=True) if self.pools else made


def on_rank_that_is_steered(plan: Constraints) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = ByHand()
    model.blocks = torch.nn.ModuleList(Steered() for _ in range(2))
    model = model.double()
    model = vescale.parallelize(make_plan(plan), model) if plan else model
    losses = list[Tensor]()
    for step, length in enumerate((13, 24, 9, 31)):
        for block in model.blocks:
            block.pools = step > 1
        losses.append(model(**batch_of(step, length, "")))
        losses[-1].backward()
    return [*(loss.detach() for loss in losses), *(whole(p.grad) for p in model.parameters())]


@pytest.mark.slow
def test_lengths_and_flags_that_steer_blocks_are_one_device_s(world2: World) -> None:
    expected = on_rank_that_is_steered({})
    for found in world2.run(on_rank_that_is_steered, {CP: 2}):
        for x, alone in zip(found, expected, strict=True):
            same(x, alone)


@pytest.mark.slow
@pytest.mark.nightly
def test_heads_of_torch_s_attention_are_sharded_besides() -> None:
    cell = verified("encoding", "tp x cp", "float64")
    assert cell.status == "rounding", cell.detail


class Checkpointed(torch.nn.Module):
    """A module that runs again in backward."""

    def __init__(self, module: torch.nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x_BSF: Tensor) -> Any:
        return checkpoint(self.module, x_BSF, use_reentrant=self.reentrant)


def on_rank_that_runs_again(family: str, plan: Constraints, reentrant: bool) -> list[Tensor]:
    """Return the loss and gradients of a model whose attention runs again in backward."""
    model: Any = build(family)
    for block in model.blocks:
        block.attention = Checkpointed(block.attention, reentrant=reentrant)
    model = vescale.parallelize(make_plan(plan), model) if plan else model
    torch.manual_seed(0)
    loss = model(**batch_of(0, 13, ""))
    loss.backward()
    return [loss.detach(), *(whole(p.grad) for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["dropping", "rotating"])
def test_attention_runs_again_in_backward(world2: World, family: str, reentrant: bool) -> None:
    expected = on_rank_that_runs_again(family, {}, reentrant)
    for found in world2.run(on_rank_that_runs_again, family, {CP: 2}, reentrant):
        for x, alone in zip(found, expected, strict=True):
            same(x, alone)


def on_rank_in_bfloat16(family: str, plan: Constraints) -> list[Tensor]:
    """Return the loss and gradients of float32 parameters under autocast."""
    model: Any = build(family, "eager" if family in EAGER else "sdpa").float()
    model = vescale.parallelize(make_plan(plan), model) if plan else model
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch_of(0, 13, "translation" if family == "t5" else ""))
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return [loss.detach().double(), *(whole(p.grad).double() for p in model.parameters())]


@pytest.mark.by_day("with_buffer", "rotating", "bloom")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["with_buffer", "rotating", "bloom", "t5"])
def test_autocast_is_as_near_to_exact_as_on_one_device(world2: World, family: str) -> None:
    model: Any = build(family, "eager" if family in EAGER else "sdpa")
    with InDouble():
        output = model(**batch_of(0, 13, "translation" if family == "t5" else ""))
    exact = output if isinstance(output, Tensor) else output.loss
    exact.backward()
    expected: list[Any] = [exact.detach(), *(p.grad for p in model.parameters())]

    def distance(found: list[Tensor]) -> float:
        pairs = zip(found, expected, strict=True)
        return max(float((x - true).norm() / true.norm()) for x, true in pairs if true.any())

    alone = distance(on_rank_in_bfloat16(family, {}))
    for found in world2.run(on_rank_in_bfloat16, family, {CP: 2}):
        # Sums over ranks and fewer rows round elsewhere, not more.
        assert distance(found) < 1.5 * alone


def on_rank_evaluated(family: str, plan: Constraints) -> list[Tensor]:
    model: Any = build(family).eval()
    if plan:
        model, _ = vescale.parallelize(make_plan(plan), model, adamw)
    found = list[Tensor]()
    with InDouble():
        for length in (13, 3, 8):
            ids = batch_of(0, length, "")["input_ids"]
            with torch.no_grad():
                found.append(model(input_ids=ids))
            with torch.inference_mode():
                found.append(model(input_ids=ids).clone())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["with_buffer", "of_torch", "encoder"])
def test_evaluation_is_that_of_one_device(world2: World, family: str) -> None:
    """Without torch's fused kernels of an encoder, which see a slice alone."""
    expected = on_rank_evaluated(family, {})
    for found in world2.run(on_rank_evaluated, family, {CP: 2}):
        for x, alone in zip(found, expected, strict=True):
            same(x, alone)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("family", ["with_buffer", "of_torch", "t5"])
def test_blocks_are_compiled_around_attention(world2: World, family: str) -> None:
    check_compiled(world2, family, {CP: 2}, (13, 9, 12))


def on_rank_generated(family: str, plan: Constraints) -> list[Tensor]:
    """Return what is generated: by decoders, of what an encoder returned once."""
    model: Any = build(family, "eager" if family in EAGER else "sdpa").eval()
    if plan:
        model, _ = vescale.parallelize(make_plan(plan), model, adamw)
    ids = batch_of(0, 9, "")["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with InDouble():
        return [model.generate(ids, **options), model.generate(ids, num_beams=2, **options)]


@pytest.mark.by_day("bloom")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart", "bloom"])
def test_ranks_generate_what_one_device_does(world2: World, family: str) -> None:
    expected = on_rank_generated(family, {})
    for found in world2.run(on_rank_generated, family, {CP: 2}):
        for tokens, alone in zip(found, expected, strict=True):
            assert torch.equal(tokens, alone)


def on_rank_with_a_frozen_encoder(plan: Constraints) -> list[Tensor]:
    """Return losses of sequences of one length, and of two; what is read needs no gradient."""
    model: Any = build("translator")
    for module in (model.embed, model.both.encoder):
        module.requires_grad_(False)
    if plan:
        model = vescale.parallelize(make_plan(plan), model)
    losses = list[Tensor]()
    for step, kind in enumerate(("", "translation", "")):
        losses.append(model(**batch_of(step, 13, kind)))
        losses[-1].backward()
    return [x.detach() for x in losses] + [whole(model.head.weight.grad)]


@pytest.mark.slow
def test_lengths_of_encoder_and_decoder_agree_by_chance(world2: World) -> None:
    expected = on_rank_with_a_frozen_encoder({})
    for found in world2.run(on_rank_with_a_frozen_encoder, {CP: 2}):
        for x, alone in zip(found, expected, strict=True):
            same(x, alone)


class Averaging(Block):
    """A block that adds running means of all positions before."""

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        length = x_BSF.shape[1]
        before = torch.ones(length, length, dtype=x_BSF.dtype).tril()
        means = (before / before.sum(-1, keepdim=True)) @ x_BSF
        return super().forward(x_BSF, cos_SD, sin_SD) + means


def on_rank_in_the_block(plan: Constraints) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = ByHand()
    model.blocks = torch.nn.ModuleList(Averaging() for _ in range(2))
    model = model.double()
    model = vescale.parallelize(make_plan(plan), model) if plan else model
    loss = model(**batch_of(0, 13, ""))
    loss.backward()
    return [loss.detach(), *(whole(p.grad) for p in model.parameters())]


@pytest.mark.slow
def test_blocks_themselves_multiply_positions(world2: World) -> None:
    expected = on_rank_in_the_block({})
    for found in world2.run(on_rank_in_the_block, {CP: 2}):
        for x, alone in zip(found, expected, strict=True):
            same(x, alone)


class Clipping(Averaging):
    """A block that writes through a view where values are large."""

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        found = super().forward(x_BSF, cos_SD, sin_SD)
        if float(found.detach().abs().max()) > 100:
            found.data.clamp_(-100, 100)
        return found


def on_rank_that_clips() -> None:
    torch.manual_seed(0)
    model: Any = ByHand()
    model.blocks = torch.nn.ModuleList(Clipping() for _ in range(2))
    model = vescale.parallelize(make_plan({CP: 2}), model.double())
    model(**batch_of(0, 13, "")).backward()
    with torch.no_grad():
        model.embed.weight.mul_(1e3)
    model(**batch_of(0, 13, ""))


@pytest.mark.slow
def test_writes_through_views_of_whole_sequences_are_refused_when_they_happen(
    world2: World,
) -> None:
    message = "in 'blocks.0' code writes to what 'data' returned, a view of a tensor of which"
    refused(world2, ValueError, message, on_rank_that_clips)


@pytest.mark.slow
def test_blocks_that_multiply_positions_are_compiled_in_no_part(world2: World) -> None:
    plan = {CP: 2, "compile": "blocks", "compile_backend": "aot_eager"}
    refused(world2, ValueError, "which is compiled, makes masks", on_rank_in_the_block, plan)
