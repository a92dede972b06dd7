"""Evaluation, generation, half precision and short sequences on ranks that share sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vescale
from vescale_testing import World

from .contexts import batch_of, build
from .experts import adamw
from .families import InDouble
from .plans import CP, Constraints, make_plan
from .training import whole


def parallel(model: Any, plan: Constraints) -> Any:
    return vescale.parallelize(make_plan(plan), model, adamw)[0] if plan else model


def on_rank_evaluated(family: str, plan: Constraints) -> dict[str, Tensor]:
    """Return what evaluation gives, of lengths that are shared out and that are not."""
    model = parallel(build(family).eval(), plan)
    found: dict[str, Tensor] = {}
    with InDouble():
        for length in (13, 3, 1):
            ids = batch_of(0, length, "")["input_ids"]
            with torch.no_grad():
                found[f"no_grad {length}"] = model(input_ids=ids).logits
            with torch.inference_mode():
                found[f"inference {length}"] = model(input_ids=ids).logits.clone()
        padded = batch_of(0, 13, "padded")
        with torch.no_grad():
            found["padded"] = model(**padded).logits[padded["attention_mask"] > 0]
    return found


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [*found] == [*expected]
    for name, x in expected.items():
        atol = 1e-12 * (float(x.abs().max()) + 1e-3)
        torch.testing.assert_close(found[name], x, rtol=0, atol=atol, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_evaluation_is_that_of_one_device(world2: World, family: str) -> None:
    expected = on_rank_evaluated(family, {})
    for found in world2.run(on_rank_evaluated, family, {CP: 2}):
        check(found, expected)


def on_rank_generated(plan: Constraints) -> list[Tensor]:
    model = parallel(build("llama").eval(), plan)
    prompts = batch_of(0, 3, "")["input_ids"]
    padded = prompts.clone()
    padded[1, :2] = 0
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return [
        model.generate(prompts, **options),
        model.generate(padded, attention_mask=(padded > 0).long(), **options),
        model.generate(prompts, num_beams=2, **options),
    ]


@pytest.mark.slow
def test_ranks_generate_what_one_device_does(world2: World) -> None:
    expected = on_rank_generated({})
    for found in world2.run(on_rank_generated, {CP: 2}):
        for tokens, x in zip(found, expected, strict=True):
            assert torch.equal(tokens, x)


def on_rank_short(plan: Constraints) -> dict[str, Tensor]:
    """Return gradients of a step of calls that are shared out, and of some that are too short."""
    model = parallel(build("by_hand"), plan)
    losses: list[Tensor] = [model(**batch_of(step, step, "")) for step in (3, 12, 2)]
    torch.stack(losses).sum().backward()
    grads = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses).detach(), **grads}


@pytest.mark.slow
def test_sequences_that_are_too_short_to_be_shared_run_whole(world2: World) -> None:
    expected = on_rank_short({})
    for found in world2.run(on_rank_short, {CP: 2}):
        check(found, expected)


def on_rank_in_bfloat16(plan: Constraints, how: str) -> dict[str, Tensor]:
    model: Any = build("llama").float()
    if how == "of-the-model" or not plan:
        model = model.bfloat16()
    elif how == "of-the-plan":
        plan = {**plan, "precision.param": "bfloat16"}
    model = parallel(model, plan)
    loss = model(**batch_of(0, 13, "")).loss
    loss.backward()
    grads = {name: whole(p.grad).double() for name, p in model.named_parameters()}
    return {"loss": loss.detach().double(), **grads}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["of-the-model", "of-the-plan"])
def test_bfloat16_is_as_near_to_exact_as_on_one_device(world2: World, how: str) -> None:
    model = build("llama")
    with InDouble():
        loss = model(**batch_of(0, 13, "")).loss
        loss.backward()
    exact: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    exact["loss"] = loss.detach()
    alone = on_rank_in_bfloat16({}, how)

    def distance(found: dict[str, Tensor]) -> float:
        return max(float((x - exact[n]).norm() / exact[n].norm()) for n, x in found.items())

    for found in world2.run(on_rank_in_bfloat16, {CP: 2}, how):
        # Sums over ranks and fewer rows round elsewhere, not more.
        assert distance(found) < 1.5 * distance(alone)
