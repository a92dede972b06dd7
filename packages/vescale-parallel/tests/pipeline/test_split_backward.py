"""A backward pass in two parts, compared with a whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._pipeline.execution.split_backward import HookedNodes, SplitBackward

WIDTH = 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 3)).transpose(1, 2) for y in self.norm_qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2)) * self.scale

    def norm_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.norm(x)).chunk(3, dim=-1)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.last = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.norm(self.first(x)).relu())


class Positions(nn.Module):
    """Weights whose way to the output has operators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.arange(4)) * 2
        return F.linear(x, F.normalize(self.weight, dim=1).exp())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Hooked(Twice):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.flatten(0, 1))
        y.register_hook(lambda grad: grad * 2)
        return y.tanh()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


class InPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Doubled.apply(x, self.weight)  # pyright: ignore[reportReturnType]


class Unconnected(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(torch.ones_like(x))


def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model), torch.rand(2, 4, WIDTH)


def split(model: nn.Module, x: Tensor) -> tuple[SplitBackward, Tensor, Tensor]:
    received = x.clone().requires_grad_()
    with HookedNodes() as hooked:
        output = model(received.view_as(received))
    return SplitBackward.of([output], [received], hooked.nodes), output, received


@pytest.mark.parametrize(
    "make",
    [
        Attention,
        Convolutions,
        Positions,
        lambda: nn.Sequential(Attention(), nn.Dropout(0.0), nn.GELU(), Attention()),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
    ],
)
def test_both_parts_together_are_a_whole_backward_of_every_microbatch(
    make: Callable[[], nn.Module],
) -> None:
    whole, model, x = made(make)
    waiting: list[tuple[SplitBackward, Tensor]] = []
    for microbatch in range(3):
        given = x * (microbatch + 1)
        expected = given.clone().requires_grad_()
        output = whole(expected.view_as(expected))
        output.backward(output.detach().cos())
        parts, output, _ = split(model, given)
        assert parts.refusal is None
        (found,) = parts.input_gradients([output.detach().cos()])
        assert found is not None
        assert expected.grad is not None
        assert torch.equal(found, expected.grad)
        waiting.append((parts, output))
    assert all(p.grad is None for p in model.parameters())
    for parts, _ in waiting:
        parts.weight_gradients()
    for (name, parameter), (_, other) in zip(
        model.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert parameter.grad is not None, name
        assert other.grad is not None
        assert torch.equal(parameter.grad, other.grad), name


def test_a_product_is_computed_once_in_all() -> None:
    def products(run: Callable[[], object]) -> int:
        with torch.profiler.profile() as profile:
            run()
        return sum(each.count for each in profile.key_averages() if each.key == "aten::mm")

    whole, model, x = made(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    expected = products(lambda: whole(x.flatten(0, 1).requires_grad_()).sum().backward())
    parts, output, _ = split(model, x.flatten(0, 1))
    first = products(lambda: parts.input_gradients([torch.ones_like(output)]))
    assert (first, products(parts.weight_gradients)) == (3, expected - 3)


def test_hooks_run_once() -> None:
    calls: list[str] = []
    _, model, x = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    layer = model[0]  # pyright: ignore[reportIndexIssue]
    layer.register_full_backward_hook(lambda *_: calls.append("module"))
    layer.weight.register_hook(lambda _: calls.append("weight"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    parts, output, _ = split(model, x)
    parts.input_gradients([torch.ones_like(output)])
    assert calls == ["module"]
    parts.weight_gradients()
    assert calls == ["module", "weight", "accumulated"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Twice, "in two places"),
        (Hooked, "a hook is on what AddmmBackward0 computes"),
        (InPython, "_DoubledBackward, which is computed in Python"),
        (lambda: Unconnected(WIDTH, WIDTH), "does not use what it is given"),
    ],
)
def test_graphs_that_cannot_be_split_say_why(make: Callable[[], nn.Module], why: str) -> None:
    _, model, x = made(make)
    parts, _, _ = split(model, x)
    assert parts.refusal is not None
    assert why in parts.refusal


def test_weights_without_a_gradient_are_left_alone() -> None:
    _, model, x = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    parts, output, _ = split(model, x)
    parts.input_gradients([torch.ones_like(output)])
    parts.weight_gradients()
    assert [p.grad is not None for p in model.parameters()] == [False, False, True, True]
