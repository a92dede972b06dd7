"""Clipping by torch's own functions: one device's numbers from one reduction in all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import vescale
from vescale_dtensor import CommCounter, distribute_tensor
from vescale_testing import World

from .models import build
from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .training import whole

PLANS: dict[str, tuple[int, Constraints]] = {
    "zero3": (2, {DP: 2, ZERO: 3}),
    "tp": (2, {TP: 2}),
    "pp": (2, {PP: 2, PARTS: 2}),
    "dp3": (3, {DP: 3, ZERO: 3}),
    "tp2 x zero3": (4, {TP: 2, DP: 2, ZERO: 3}),
}
ORDERS = (1.0, 2.0, math.inf, 0.5)


def gradients(model: nn.Module, scale: float = 1.0) -> None:
    """Give every parameter but the second the same gradient as on one device."""
    generator = torch.Generator().manual_seed(3)
    for index, parameter in enumerate(model.parameters()):
        values = scale * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        grad: Any = torch.zeros_like(parameter.detach())
        with torch.no_grad():
            grad.copy_(_as(values, parameter))
        parameter.grad = None if index == 1 else grad


def _as(values: Tensor, like: Any) -> Any:
    mesh = getattr(like, "device_mesh", None)
    return values if mesh is None else distribute_tensor(values, mesh, like.placements)


def everything(model: nn.Module) -> list[Tensor]:
    """Clip in every way; return norms and gradients."""
    results: list[Tensor] = []

    def run(clip: Callable[[], Any]) -> None:
        gradients(model)
        with CommCounter() as counter:
            norm = clip()
        assert counter.num_collectives <= 1, counter.num_collectives
        if norm is not None:
            results.append(whole(norm).clone())
        results.extend(whole(p.grad).clone() for p in model.parameters() if p.grad is not None)

    def listed() -> list[nn.Parameter]:
        return list(model.parameters())

    def grads() -> Iterable[Tensor]:
        return [p.grad for p in model.parameters() if p.grad is not None]

    for order in ORDERS:
        run(lambda order=order: clip_grad_norm_(model.parameters(), 1.0, order))
    run(lambda: clip_grad_norm_(listed()[2:7], 0.5, foreach=True))
    run(lambda: clip_grad_norm_(listed()[0], 0.5))
    run(lambda: clip_grad_norm_(model.parameters(), 1e6, error_if_nonfinite=True))
    run(lambda: clip_grad_value_(model.parameters(), 0.1))
    run(lambda: clip_grad_value_(model.parameters(), 0.1, foreach=False))
    run(lambda: get_total_norm(grads(), 1.0))
    run(lambda: clip_grads_with_norm_(model.parameters(), 0.3, get_total_norm(grads())))
    run(lambda: clip_grad_norm_((p for p in listed() if p.ndim == 1), 0.3))
    return results


def degenerate(model: nn.Module) -> None:
    """No gradients at all, and infinite ones."""
    for parameter in model.parameters():
        parameter.grad = None
    assert float(clip_grad_norm_(model.parameters(), 1.0)) == 0.0
    gradients(model, math.inf)
    with pytest.raises(RuntimeError, match=r"The total norm of order 2.0 .* is non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not math.isfinite(float(clip_grad_norm_(model.parameters(), 1.0)))


def one_by_one(model: nn.Module) -> list[Tensor]:
    """``foreach=False`` asks for a norm a tensor: as many reductions, the same numbers."""
    gradients(model)
    norm = clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    return [whole(norm), *(whole(p.grad) for p in model.parameters() if p.grad is not None)]


def on_rank(name: str, constraints: Constraints) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = build(name).double()
    torch.manual_seed(0)
    other = build(name).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel = vescale.parallelize(make_plan(constraints), other)
    for each in (parallel, model):
        degenerate(each)
    found = everything(parallel) + one_by_one(parallel)
    return found, everything(model) + one_by_one(model)


IN_CI = {("llama", "pp"), ("gpt2", "zero3"), ("gpt2", "tp2 x zero3")}
CASES = [
    pytest.param(name, plan, marks=() if (name, plan) in IN_CI else pytest.mark.nightly)
    for name in ("llama", "gpt2")
    for plan in PLANS
]


@pytest.mark.by_day("llama-pp")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_clipping_is_one_devices_and_reduces_once(
    request: pytest.FixtureRequest, name: str, plan: str
) -> None:
    ranks, constraints = PLANS[plan]
    world: World = request.getfixturevalue(f"world{ranks}")
    for found, expected in world.run(on_rank, name, constraints):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
