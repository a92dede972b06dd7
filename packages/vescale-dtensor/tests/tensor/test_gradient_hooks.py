"""Hooks of a distributed tensor hear of gradients, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from vescale_dtensor import distribute_tensor, emulate


class _Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with emulate(2):
        yield


def _parameter() -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))


def test_hooks_are_called_with_gradients_and_not_where_a_function_gives_none() -> None:
    parameter, other = _parameter(), _parameter()
    heard: list[Any] = []
    parameter.register_hook(lambda grad: heard.append(grad.full_tensor().tolist()))
    parameter.register_hook(lambda grad: grad * 2)
    parameter.register_post_accumulate_grad_hook(lambda x: heard.append(x.grad.full_tensor()[0]))
    _Stops.apply(other, parameter).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert heard == []
    parameter.sum().backward()
    assert heard == [[1.0] * 4, 2.0]


def test_a_hook_that_is_removed_is_not_called() -> None:
    parameter = _parameter()
    heard: list[Tensor] = []
    parameter.register_hook(heard.append).remove()
    parameter.register_post_accumulate_grad_hook(heard.append).remove()
    parameter.sum().backward()
    assert heard == []
