"""Mixtures that are finetuned on several ranks: frozen parts, and adapters of PEFT."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_dtensor import GatherWarning
from vescale_testing import World

from .experts import AllInDouble, build, rows_of, tokens
from .listed_experts import LAYERS, Model
from .plans import DP, EP, TP, ZERO, Constraints, make_plan
from .training import whole

ROWS = 12  # of two ranks, three or four
RECOMPUTE: Constraints = {"recompute": "full"}

# What is trained, by names of parameters.
TRAINED = {
    "all": lambda name: True,
    "no_experts": lambda name: ".experts." not in name,
    "experts": lambda name: ".experts." in name,
    "head": lambda name: "head" in name,
    "some_of_each": lambda name: "gate_up_proj" not in name and "experts.0" not in name,
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj"]},
    "lora_of_lists": {"target_modules": ["gate_proj", "up_proj", "down_proj"], "task_type": None},
    "lora_of_stacks": {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "lora_of_all": {"target_modules": "all-linear"},
}


def make(kind: str, family: str, **more: Any) -> nn.Module:
    """Return a model in float64 that is trained in part, or by adapters that do something."""
    model: Any = Model(family, **more) if family in LAYERS else build(family, **more)
    if kind in TRAINED:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(TRAINED[kind](name))
        return model
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about transformers 6 and about large targets
        options: dict[str, Any] = {"r": 2, "task_type": "CAUSAL_LM", **ADAPTERS[kind]}
        model = get_peft_model(model, LoraConfig(**options)).double()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, as drawn
            nn.init.normal_(parameter, std=0.1)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def finetuned(
    kind: str, family: str, more: Mapping[str, Any], plan: Constraints | None, exact: bool = True
) -> dict[str, Tensor]:
    """Return the losses and gradients of three steps, and the parameters at their end.

    In float64 throughout if ``exact``, which backward cannot be that runs forward again.
    """
    model: Any = make(kind, family, **more)
    if plan is None:
        optimizer: Any = adamw(model)
    else:
        model, optimizer = vescale.parallelize(make_plan(plan), model, adamw)
    found: dict[str, Tensor] = {}
    for step in range(3):
        in_double = AllInDouble() if exact else contextlib.nullcontext()
        with in_double, warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)
            made = model(**rows_of(model, tokens(step, ROWS)))
            loss = getattr(made, "loss", made)
            loss.backward()
        found[f"loss {step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[f"gradient {step} {name}"] = whole(grad).clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def check(world: World, kind: str, family: str, plan: Constraints, **more: Any) -> None:
    if kind in ADAPTERS:
        pytest.importorskip("peft")
    exact = "recompute" not in plan
    if exact:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        expected = finetuned(kind, family, more, None)
        torch.set_num_threads(threads)
    else:
        once = {key: value for key, value in plan.items() if key != "recompute"}
        expected = world.run(finetuned, kind, family, more, once, exact)[0]
    for found in world.run(finetuned, kind, family, more, plan, exact):
        assert [*found] == [*expected]
        for name, value in expected.items():
            # Sums of float64 over tokens of other ranks in another order, in three steps of AdamW.
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.by_day("no_experts-Slots-3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family", "zero"),
    [
        ("no_experts", "mixtral", 0),
        ("no_experts", "Slots", 3),
        ("some_of_each", "mixtral", 3),
        ("some_of_each", "Slots", 0),
        ("experts", "OldMixtral", 1),
        ("head", "Slots", 0),
    ],
)
def test_frozen_parts_stay_and_the_others_train_as_on_one_device(
    world2: World, kind: str, family: str, zero: int
) -> None:
    check(world2, kind, family, {DP: 2, EP: 2, ZERO: zero})


@pytest.mark.by_day("mixtral-*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"), [("Slots", {}), ("mixtral", {"num_local_experts": 6})], ids=str
)
def test_three_ranks_share_experts(world3: World, family: str, more: dict[str, Any]) -> None:
    """Of four in a list the first rank has two."""
    check(world3, "all", family, {DP: 3, EP: 3, ZERO: 2}, **more)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family", "plan"),
    [
        ("lora", "mixtral", {EP: 2, ZERO: 3}),
        ("lora_of_lists", "DeepSeek", {EP: 2}),
        ("lora_of_stacks", "qwen3_moe", {EP: 2, ZERO: 3}),
        ("lora_of_all", "mixtral", {EP: 2, **RECOMPUTE}),
        ("lora_of_stacks", "qwen3_moe", RECOMPUTE),
    ],
    ids=str,
)
def test_adapters_train_as_on_one_device(
    world2: World, kind: str, family: str, plan: Constraints
) -> None:
    check(world2, kind, family, {DP: 2, **plan}, skewed=True)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["lora_of_stacks", "lora_of_all"])
@pytest.mark.parametrize(
    "plan",
    [
        {DP: 4, EP: 2, ZERO: 3},
        {DP: 4, EP: 4},
        {DP: 4, EP: 4, ZERO: 1, **RECOMPUTE},
        {DP: 2, EP: 2, TP: 2},
    ],
    ids=str,
)
def test_four_ranks_share_experts_with_adapters(
    world4: World, kind: str, plan: Constraints
) -> None:
    check(world4, kind, "qwen3_moe", plan, implementation="batched_mm", skewed=True)
