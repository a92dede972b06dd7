"""Parameters that users' hooks read stay whole, since hooks are not run in a check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import propose_sharding

from . import odd_models as odd

X = torch.linspace(-1, 1, 2 * 6 * 12).view(2, 6, 12)


def penalty(module: nn.Module) -> Tensor:
    return module.get_submodule("up").weight.sum()  # pyright: ignore[reportCallIssue,reportAttributeAccessIssue]: a Tensor


def by_argument(model: odd.Stacked) -> Callable[..., Any]:
    return lambda module, args, output: output + module.up.weight.sum()


def by_closure(model: odd.Stacked) -> Callable[..., Any]:
    weight = model.get_parameter("blocks.0.up.weight")
    return lambda module, args, output: output + weight.sum()


def by_function(model: odd.Stacked) -> Callable[..., Any]:
    return lambda module, args, output: output + penalty(module)


def by_partial(model: odd.Stacked) -> Callable[..., Any]:
    def hook(held: nn.Module, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + sum(p.sum() for p in held.parameters())

    return functools.partial(hook, model.blocks[0])


def harmless(model: odd.Stacked) -> Callable[..., Any]:
    seen: list[Any] = []
    return lambda module, args, output: seen.append(output.shape)


@pytest.mark.parametrize("make", [by_argument, by_closure, by_function, by_partial])
def test_what_a_hook_reads_stays_whole(make: Callable[[odd.Stacked], Callable[..., Any]]) -> None:
    model = odd.Stacked()
    model.blocks[0].register_forward_hook(make(model))
    found = propose_sharding(model, "auto", 2, example_batch=(X,))
    assert not found.plan
    assert any("a hook of 'blocks.0' may read it" in why for why in found.left_whole.values())


def test_a_hook_that_only_looks_changes_no_plan() -> None:
    model = odd.Stacked()
    model.blocks[0].register_forward_hook(harmless(model))
    assert propose_sharding(model, "auto", 2, example_batch=(X,)).plan
