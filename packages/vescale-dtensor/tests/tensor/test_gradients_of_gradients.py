"""Gradients that have a graph go through the ways into a distributed tensor and out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_dtensor import DTensor, distribute_tensor, emulate

Way = Callable[[DTensor, DeviceMesh], Tensor]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with emulate(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def _redistributed(x: DTensor, mesh: DeviceMesh) -> Tensor:
    return x.redistribute(placements=[Replicate()])


def _in_parts(x: DTensor, mesh: DeviceMesh) -> Tensor:
    local = x.to_local()
    return DTensor.from_local(local, mesh, x.placements, shape=x.shape)


def _gathered(x: DTensor, mesh: DeviceMesh) -> Tensor:
    whole = x.full_tensor()
    return DTensor.from_local(whole, mesh, [Replicate()], shape=x.shape)


def _of_parts_that_are_summed(x: DTensor, mesh: DeviceMesh) -> Tensor:
    whole = x.full_tensor(grad_placements=[Partial()]) / 2
    return DTensor.from_local(whole, mesh, [Partial()], shape=x.shape)


@pytest.mark.parametrize("way", [_redistributed, _in_parts, _gathered, _of_parts_that_are_summed])
def test_a_third_derivative_is_that_of_one_device(mesh: DeviceMesh, way: Way) -> None:
    values = torch.linspace(-1, 1, 6, dtype=torch.float64)

    def third(x: Any, through: Callable[[Any], Any]) -> Tensor:
        value = through(through(x).square() * x).sin()
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            value = through(value)
        return value

    expected = third(values.clone().requires_grad_(), lambda x: x)
    given = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
    found: Any = third(given, lambda x: way(x.redistribute(placements=[Shard(0)]), mesh))
    # float64: sums over ranks are in another order.
    assert torch.allclose(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    found_next: Any = torch.autograd.grad(found.sum(), given)[0]
    x = values.clone().requires_grad_()
    (expected_next,) = torch.autograd.grad(third(x, lambda x: x).sum(), x)
    assert torch.allclose(found_next.full_tensor(), expected_next, rtol=1e-12, atol=1e-12)
