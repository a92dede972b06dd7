"""NaN and infinity are named where they begin: rank, module, output or gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale
from vescale_parallel import with_constraints
from vescale_testing import RankError, World

from .plans import DP, PARTS, PP, ZERO

NAN = float("nan")


class Spoil(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * float("inf")


class Block(nn.Module):
    def __init__(self, is_bad: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_bad = is_bad

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return Spoil.apply(x) if self.is_bad else x  # pyright: ignore[reportReturnType]


class Net(nn.Module):
    def __init__(self, bad: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index == bad) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def spoil_inputs(constraints: Mapping[str, Any], spoilt: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plan = with_constraints(vescale.ParallelPlan(), constraints)
    model = vescale.parallelize(plan, Net())
    rows = torch.randn(8, 8) + dist.get_rank() // plan.pipeline_parallel.size
    with vescale.detect_nonfinite(model):
        model(rows).backward()
        if dist.get_rank() in spoilt:
            rows[3, 5] = NAN
        model(rows).backward()


def test_the_rank_and_the_innermost_module_are_named(world2: World) -> None:
    with pytest.raises(RankError) as caught:
        world2.run(spoil_inputs, {DP: 2, ZERO: 3}, (1,))
    text = "'blocks.0.up' (Linear) returned 8 NaN of 64 elements on rank 1; among its inputs were"
    assert f"FloatingPointError: {text} 1 NaN of 64 elements" in caught.value.errors[1]


def test_a_stage_names_its_own_module(world2: World) -> None:
    with pytest.raises(RankError) as caught:
        world2.run(spoil_inputs, {PP: 2, PARTS: 4}, (0, 1))
    assert (
        "'blocks.0.up' (Linear) returned 8 NaN of 16 elements on rank 0" in caught.value.errors[0]
    )


def test_a_parameter_that_is_not_finite_is_named() -> None:
    model = Net()
    down = model.get_submodule("blocks.2.down")
    assert isinstance(down, nn.Linear)
    with torch.no_grad():
        down.weight[0, 0] = float("inf")
    with (
        pytest.raises(
            FloatingPointError, match=r"'blocks.2.down' .* of its parameters weight was"
        ),
        vescale.detect_nonfinite(model),
    ):
        model(torch.ones(2, 8))
    with torch.no_grad():
        down.weight[0, 0] = 0
        down.bias.fill_(-float("inf"))
        with vescale.detect_nonfinite(model.blocks[2], infinities=False):
            model.blocks[2](torch.ones(2, 8))


def test_the_backward_pass_that_gives_it_is_named() -> None:
    torch.manual_seed(0)
    model = Net(bad=1)
    with vescale.detect_nonfinite(model):
        loss = model(torch.randn(2, 8))
        with pytest.raises(
            FloatingPointError,
            match=r"backward of 'blocks.1.down' \(Linear\) gave 16 NaN of 16 elements",
        ):
            loss.backward()


def test_bits_are_those_without_and_nothing_is_left() -> None:
    grads: list[list[Tensor]] = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        model = Net()
        x = torch.randn(4, 8)
        if is_watched:
            with vescale.detect_nonfinite(model):
                loss = model(x)
            # The graph outlives the block, and is looked at no more.
            (loss * NAN).backward()
            model.zero_grad()
            with vescale.detect_nonfinite(model):
                model(x).backward()
            assert not any(module._forward_hooks for module in model.modules())
        else:
            model(x).backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert grads[0]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
