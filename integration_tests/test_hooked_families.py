"""Hooks on every module of model families are given what one device gives them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # noqa: PLC2701 (its other name is documented)

import vescale

from .families import InDouble, make
from .plans import CP, SEQUENCE, TP, Constraints
from .test_stays_pytorch import whole

FAMILIES = (
    "nanogpt", "encoding", "llama", "one_key_value_head", "qwen3", "gemma2", "gpt2", "bert", "t5",
    "bart", "vit", "gpt_neox", "whisper",
)  # fmt: skip
PLANS: dict[str, Constraints] = {
    "tp": {TP: 2},
    "sequence": {TP: 2, SEQUENCE: True},
    "cp": {CP: 2},
    "ring": {CP: 2, "context_parallel.method": "ring"},
}
# What lies over ranks otherwise, which a warning says: attention weights of this rank's heads, and
# a module that is called on whole sequences and on slices.
NOT_FOUND = {
    ("gemma2", "cp"): {"model.layers.0.self_attn", "model.layers.1.self_attn"},
    ("t5", "cp"): {"decoder.dropout"},
    ("t5", "ring"): {"decoder.dropout"},
}


@dataclass
class Seen:
    """What hooks were given: by module, whether it returned it, place, and number of the call."""

    given: dict[tuple[str, bool, int, int], Tensor] = field(default_factory=dict[Any, Tensor])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    kept: list[Tensor] = field(default_factory=list[Tensor])
    calls: Counter[tuple[str, bool, int]] = field(default_factory=Counter[tuple[str, bool, int]])

    def hook(self, fqn: str, module: nn.Module) -> None:
        def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for is_output, tree in ((False, (args, kwargs)), (True, output)):
                for at, x in enumerate(pytree.tree_leaves(tree)):
                    if isinstance(x, Tensor) and x.is_floating_point():
                        self.note((fqn, is_output, at), x)

        module.register_forward_hook(note, with_kwargs=True)

    def note(self, place: tuple[str, bool, int], x: Tensor) -> None:
        self.calls[place] += 1
        self.given[*place, self.calls[place]] = whole(x).detach().clone()
        if x.requires_grad:
            self.kept.append(x)


def trained(family: str, constraints: Constraints | None, unhooked: frozenset[str]) -> Seen:
    """Add the mean of the squares of all that hooks are given to the loss."""
    torch.manual_seed(3)
    with InDouble():
        model, call = make(family)
        model = model.double()
        if constraints is not None:
            plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=call)
            model = vescale.parallelize(plan, model)
        seen = Seen()
        for fqn, module in model.named_modules():
            if fqn and fqn not in unhooked:
                seen.hook(fqn, module)
        output: Any = model(**call)
        loss = output if isinstance(output, Tensor) else output.loss
        (loss + sum((x.square().mean() for x in seen.kept), torch.zeros(()))).backward()
    named = model.named_parameters()
    seen.gradients = {name: whole(p.grad) for name, p in named if p.grad is not None}
    seen.kept.clear()
    return seen


@cache
def on_one_device(family: str, unhooked: frozenset[str]) -> Seen:
    return trained(family, None, unhooked)


@pytest.mark.by_day("bert-sequence", "gpt2-cp")
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_of_every_module_see_one_device(family: str, name: str) -> None:
    unhooked = frozenset(NOT_FOUND.get((family, name), ()))
    one = on_one_device(family, unhooked)
    for seen in vescale.emulate(trained, 2, args=(family, PLANS[name], unhooked)):
        # Without the cache of keys and values that context parallelism leaves out.
        assert {place[0] for place in seen.given} == {place[0] for place in one.given}
        for place in seen.given.keys() & one.given.keys():
            close(seen.given[place], one.given[place], str(place))
        assert seen.gradients.keys() == one.gradients.keys()
        for fqn, gradient in seen.gradients.items():
            close(gradient, one.gradients[fqn], fqn)


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Compare float64 numbers that were summed in another order: small ones of large ones."""
    atol = 1e-12 * float(expected.abs().max()) + 1e-15
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=atol, msg=what)


@pytest.mark.slow
def test_what_lies_otherwise_is_said() -> None:
    with pytest.warns(UserWarning, match="'decoder.dropout', sees what this rank has of value 0"):
        vescale.emulate(trained, 2, args=("t5", PLANS["cp"], frozenset[str]()))
