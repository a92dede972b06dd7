"""Lightning Fabric around a parallelized model: what is left of it works, its setup is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import with_constraints
from vescale_testing import World

from .training import whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x).square().mean()


def _fabric() -> Any:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the machine: sockets, other accelerators
        fabric: Any = Fabric(accelerator="cpu", devices=2, plugins=[TorchElasticEnvironment()])
        fabric.launch()
    return fabric


def _trained(*, with_setup: bool) -> list[Tensor]:
    fabric = _fabric()
    torch.manual_seed(0)
    rows = list(torch.randn(16, 4).double())
    constraints = {"batch.global_size": 4, "data_parallel.size": 2}
    plan = with_constraints(vescale.ParallelPlan(), constraints)
    model: Any
    model, optimizer, loader = vescale.parallelize(
        plan, Net().double(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), dataset=rows
    )
    if with_setup:
        model, optimizer = fabric.setup(model, optimizer)
    for batch in loader:
        fabric.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter) for parameter in model.parameters()]


def _on_rank(with_setup: bool) -> list[Tensor]:
    return _trained(with_setup=with_setup)


def _alone() -> list[Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(16, 4).double()
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in rows.split(4):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters()]


@pytest.mark.slow
def test_a_loop_of_fabric_without_its_setup_is_that_of_one_device(world2: World) -> None:
    expected = _alone()
    for found in world2.run(_on_rank, False):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other.detach(), rtol=1e-12, atol=1e-14)


def _refused() -> str:
    with pytest.raises(ValueError, match=r"leave out fabric\.setup") as caught:
        _trained(with_setup=True)
    return str(caught.value)


@pytest.mark.slow
def test_the_setup_of_fabric_is_refused_with_what_to_do(world2: World) -> None:
    for message in world2.run(_refused):
        assert "Lightning Fabric" in message
    world2.close()  # Fabric leaves a state of the process behind
