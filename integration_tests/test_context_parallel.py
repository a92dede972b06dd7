"""Ranks that share a sequence: the loss, gradients and parameters of one device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vescale
from vescale_testing import World

from .contexts import ROWS, batch_of, build, rows_of, train
from .experts import Trained, adamw
from .families import InDouble
from .plans import CP, DP, TP, ZERO, Constraints, make_plan
from .test_expert_parallel import compare
from .training import whole


@cache
def on_one_device(family: str, more: tuple[tuple[str, Any], ...]) -> Trained:
    return train(family, None, **dict(more))


def check(world: World, plan: Constraints, family: str, **more: Any) -> None:
    """Train under a plan and compare every rank with one device."""
    expected = on_one_device(family, tuple(more.items()))
    given: dict[str, Any] = {
        "length": 12,
        "kind": "",
        "attention": "sdpa",
        "rows": ROWS,
        "steps": 3,
    } | more
    compare(world.run(train, family, plan, *given.values()), expected)


@pytest.mark.by_day("gpt2", "by_hand")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2", "gemma3_text", "by_hand"])
def test_two_ranks_share_the_sequences_of_a_causal_model(world2: World, family: str) -> None:
    check(world2, {CP: 2}, family)


@pytest.mark.by_day("llama")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_four_ranks_share_sequences_that_they_do_not_divide(world4: World, family: str) -> None:
    check(world4, {CP: 4}, family, length=13)


@pytest.mark.by_day("all_to_all")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_to_all", "ring"])
def test_three_ranks_share_one_row(world3: World, method: str) -> None:
    check(world3, {CP: 3, "context_parallel.method": method}, "llama", length=13, rows=1)


def on_rank_with_own_loss(plan: Constraints | None) -> list[torch.Tensor]:
    """Return a loss that the program makes of logits, and gradients."""
    model = build("qwen3")
    if plan is not None:
        model, _ = vescale.parallelize(make_plan(plan), model, adamw)
    batch = batch_of(0, 13, "")
    targets = batch["labels"][:, 1:].flatten()
    with InDouble():
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        loss.backward()
    grads: list[Any] = [p.grad for p in model.parameters()]
    return [loss.detach(), *(whole(grad).clone() for grad in grads)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_to_all", "ring"])
def test_losses_are_made_outside_of_the_model(world3: World, method: str) -> None:
    expected = on_rank_with_own_loss(None)
    plan = {CP: 3, ZERO: 3, "context_parallel.method": method}
    for found in world3.run(on_rank_with_own_loss, plan):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12 * max(1.0, float(y.abs().max())))


@pytest.mark.by_day("0")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_share_sequences_and_batches_under_every_stage(world4: World, zero: int) -> None:
    check(world4, {CP: 2, DP: 2, ZERO: zero}, "by_hand", length=9)


@pytest.mark.by_day("2")
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


def on_rank_in_parts(plan: Constraints) -> list[int]:
    """Return how many positions the second block sees, in every micro-batch."""
    model: Any = vescale.parallelize(make_plan(plan), build("by_hand"))
    seen, block = list[int](), model.blocks[1]
    own = block.forward  # a hook is given all positions

    def forward(x_BSF: torch.Tensor, *args: Any) -> Any:
        seen.append(x_BSF.shape[1])
        return own(x_BSF, *args)

    block.forward = forward
    model(**batch_of(0, 12, "")).backward()
    return seen


@pytest.mark.slow
def test_blocks_of_calls_in_parts_see_slices(world2: World) -> None:
    plan = {CP: 2, "batch.gradient_accumulation": 2}
    assert world2.run(on_rank_in_parts, plan) == [[6, 6], [6, 6]]


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


@pytest.mark.nightly
@pytest.mark.slow
def test_checkpoints_are_of_no_number_of_slices(world4: World, tmp_path: Path) -> None:
    for before, after in world4.run(on_rank_resumed, str(tmp_path / "saved")):
        for name, parameter in before.items():
            # AdamW divides by gradients that may be nothing but rounding.
            torch.testing.assert_close(after[name], parameter, rtol=0, atol=1e-10, msg=name)


# Each with what makes it unlike the models above.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("llama", {"attention": "eager"}),
    "sinks": ("gpt_oss", {"attention": "eager"}),
    "three-heads": (
        "llama",
        {"more": (("num_attention_heads", 3), ("num_key_value_heads", 3), ("hidden_size", 24))},
    ),
    "six-heads-of-three": (
        "llama",
        {"more": (("num_attention_heads", 6), ("num_key_value_heads", 3), ("hidden_size", 48))},
    ),
    "padded": ("llama", {"kind": "padded"}),
    "padded-eager": ("llama", {"kind": "padded", "attention": "eager"}),
    "packed": ("llama", {"kind": "packed"}),
    "windows-and-all-padded": ("gemma3_text", {"kind": "padded", "length": 13}),
    "windows-packed": ("mistral", {"kind": "packed", "length": 13}),
    "one-row": ("gpt2", {"rows": 1, "length": 11}),
    "bidirectional-padded": ("bert", {"kind": "padded"}),
    "pooled": ("roberta", {"kind": "classes"}),
    "experts": ("qwen3_moe", {}),
    "as-long-as-a-head": ("llama", {"length": 8}),
    "as-long-as-heads": ("gpt2", {"length": 4}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_attention_of_other_kinds(world2: World, name: str) -> None:
    family, more = OTHERS[name]
    check(world2, {CP: 2}, family, **more)


@pytest.mark.nightly
# Of three heads, or of four positions, four ranks cannot have parts.
@pytest.mark.parametrize("name", sorted({*OTHERS} - {"three-heads", "as-long-as-heads"}))
def test_attention_of_other_kinds_on_four_ranks(world4: World, name: str) -> None:
    family, more = OTHERS[name]
    check(world4, {CP: 4}, family, **more)


def on_rank_with_loader(plan: Constraints) -> list[float]:
    """Train on what the loader hands out; ranks of one sequence have the same rows."""
    dataset = [{name: x[row] for name, x in batch_of(0, 9, "", 8).items()} for row in range(8)]
    plan = {"batch.global_size": 4, **plan}
    model, optimizer, loader = vescale.parallelize(
        make_plan(plan), build("by_hand"), adamw, None, dataset
    )
    losses: list[float] = []
    for batch in loader:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model(**rows_of(model, batch_of(3, 7, ""))).item())
    return losses


@pytest.mark.slow
def test_ranks_of_a_sequence_are_handed_the_same_rows(world1: World, world4: World) -> None:
    [expected] = world1.run(on_rank_with_loader, {})
    for losses in world4.run(on_rank_with_loader, {CP: 2, DP: 2, ZERO: 3}):
        assert losses == pytest.approx(expected, rel=1e-12, abs=0)


DROPOUTS: dict[str, tuple[tuple[str, Any], ...]] = {
    "gpt2": (("embd_pdrop", 0.2),),
    "bert": (("hidden_dropout_prob", 0.2),),
}


def on_rank_with_dropout(
    family: str, plan: Constraints | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return losses and gradients of two steps, and the generator's state behind them."""
    model: Any = build(family, **dict(DROPOUTS[family]))
    for fqn, module in model.named_modules():
        if family == "bert" and "encoder" in fqn and isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    torch.manual_seed(3)
    if plan is not None:
        model, _ = vescale.parallelize(make_plan(plan), model, adamw)
    found: list[torch.Tensor] = []
    for step in range(2):
        with InDouble():
            loss = model(**rows_of(model, batch_of(step, 13, ""))).loss
            loss.backward()
        found.append(loss.detach())
    grads: list[Any] = [p.grad for p in model.parameters()]
    found += [whole(grad).clone() for grad in grads if grad is not None]
    return found, torch.get_rng_state()


def check_dropout(world: World, family: str, plan: Constraints) -> None:
    [(expected, state)] = vescale.emulate(on_rank_with_dropout, 1, args=(family, None))
    for found, end in world.run(on_rank_with_dropout, family, plan):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12 * max(1.0, float(y.abs().max())))
        assert torch.equal(end, state)
        assert not torch.equal(end, torch.Generator().manual_seed(3).get_state())


@pytest.mark.by_day("gpt2")
@pytest.mark.slow
@pytest.mark.parametrize("family", DROPOUTS)
def test_dropout_before_blocks_is_that_of_one_device(world4: World, family: str) -> None:
    check_dropout(world4, family, {CP: 2, DP: 2, ZERO: 3, "recompute": "full"})


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["all_to_all", "ring"])
@pytest.mark.parametrize("more", [{}, {TP: 2}, {"batch.gradient_accumulation": 2}], ids=str)
@pytest.mark.parametrize("family", DROPOUTS)
def test_dropout_before_blocks_under_other_plans(
    world2: World, world4: World, family: str, more: Constraints, method: str
) -> None:
    world = world4 if TP in more else world2
    check_dropout(world, family, {CP: 2, "context_parallel.method": method, **more})


def on_rank_refused(family: str) -> str:
    with pytest.raises(ValueError, match="context_parallel") as error:
        vescale.parallelize(make_plan({CP: 2}), build(family, "eager"), adamw)
    return str(error.value)


@pytest.mark.slow
def test_models_without_attention_are_refused(world2: World) -> None:
    for said in world2.run(on_rank_refused, "mamba"):
        assert "found no list of two or more blocks that all attend" in said


def on_rank_packed() -> str:
    model, _ = vescale.parallelize(make_plan({CP: 2}), build("llama"), adamw)
    batch = batch_of(0, 12, "packed")
    with pytest.raises(ValueError, match="position_ids say where documents begin") as error:
        model(**{name: each for name, each in batch.items() if name != "use_cache"})
    return str(error.value)


@pytest.mark.slow
def test_positions_that_one_device_reads_otherwise_are_refused(world2: World) -> None:
    for said in world2.run(on_rank_packed):
        assert "use_cache=False" in said
