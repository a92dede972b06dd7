"""Batch norms in models that compute in half precision keep the dtype of their statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import with_constraints
from vescale_testing import World

from .training import whole

HALF = {"precision.param": "bfloat16", "precision.reduce": "float32"}
DP2 = {"data_parallel.size": 2}
ROWS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU())
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean((2, 3)))).float().pow(2).mean()


def _compare(constraints: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made, x = Net(), torch.randn(ROWS, 3, 8, 8)
    alone = copy.deepcopy(made).to(torch.bfloat16)
    for module in alone.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.float()  # as torch's batch norm takes half precision
    plan = with_constraints(vescale.ParallelPlan(), {**HALF, **constraints})
    model = vescale.parallelize(plan, made)
    own = x.chunk(plan.data_parallel.size)[vescale.data_parallel_rank(model)]
    for _ in range(2):
        expected, found = alone(x.to(torch.bfloat16)), model(own)
        expected.backward()
        found.backward()
        assert torch.equal(found.detach(), expected.detach())
    for buffer, other in zip(model.buffers(), alone.buffers(), strict=True):
        assert buffer.dtype == other.dtype
        assert torch.equal(buffer, other)
    grads = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    # Gradients of two ranks are rounded before they are added.
    rounding = 2**-8 * max(float(grad.abs().max()) for grad in grads.values())
    atol = 0.0 if plan.data_parallel.size == 1 else rounding
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = whole(parameter.grad)
        torch.testing.assert_close(grad, grads[name].float(), rtol=0.0, atol=atol, msg=name)
    model.eval()
    alone.eval()
    assert torch.equal(model(own).detach(), alone(x.to(torch.bfloat16)).detach())


@pytest.mark.by_day("1-said0", "2-said2")
@pytest.mark.parametrize(
    ("size", "said"),
    [(1, {}), (2, DP2), (2, {**DP2, "data_parallel.zero_stage": 3, "recompute": "full"})],
)
def test_batch_norm_computes_with_weights_of_the_dtype_of_statistics(
    request: pytest.FixtureRequest, size: int, said: dict[str, Any]
) -> None:
    world: World = request.getfixturevalue(f"world{size}")
    world.run(_compare, said)
