"""The operators of torch's optimizers and gradient scaler, on parts of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import CommCounter, DTensor, distribute_tensor, emulate

SHAPES = ((6, 5), (7,), (1, 3), (4, 2, 2))
PLACED: dict[str, tuple[Placement, ...]] = {
    "shard": (Shard(0),),
    "last": (Shard(-1),),
    "whole": (Replicate(),),
}


def placed(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    return distribute_tensor(tensor, mesh, placements)


def not_none(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def whole(tensor: Tensor | None) -> Tensor:
    part = not_none(tensor).detach()
    assert isinstance(part, DTensor)
    return part.full_tensor()


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Scaled:
    """Parameters with gradients, in the hands of a scaler."""

    def __init__(self, place: Callable[[Tensor], Tensor], bad: tuple[int, int] | None) -> None:
        self.params = [nn.Parameter(place(value)) for value in values(0)]
        for index, (param, value) in enumerate(zip(self.params, values(1), strict=True)):
            if bad is not None and bad[0] == index:
                value.view(-1)[bad[1]] = torch.inf
            param.grad = place(value)
        self.optimizer = torch.optim.SGD(self.params, 0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.scaler.scale(torch.ones(()))  # makes its state

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("bad", [None, (0, 29), (1, 0), (2, 1), (3, 15)])
@pytest.mark.parametrize("kind", PLACED)
def test_what_one_rank_finds_infinite_all_skip(kind: str, bad: tuple[int, int] | None) -> None:
    expected = Scaled(torch.clone, bad)
    expected.step()
    with emulate(4), warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = init_device_mesh("cpu", (4,))
        found = Scaled(lambda tensor: placed(tensor, mesh, PLACED[kind]), bad)
        with CommCounter() as counter:
            found.scaler.unscale_(found.optimizer)
        assert counter.nbytes <= 3 * 4 * 2  # no gradient is moved
        found.scaler.step(found.optimizer)
        found.scaler.update()
        assert found.scaler.get_scale() == expected.scaler.get_scale()
        for mine, theirs in zip(found.params, expected.params, strict=True):
            assert torch.equal(whole(mine), theirs)
            assert torch.equal(whole(mine.grad), not_none(theirs.grad))


def test_partial_gradients_are_summed_before_they_are_judged() -> None:
    with emulate(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2,))
        grad = DTensor.from_local(torch.full((3,), 3e38), mesh, [Partial()])
        found = torch.zeros(())
        unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_
        unscale([grad], found, torch.ones(()))
        assert found.item() == 1  # each part is finite


FUSED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, 0.1, amsgrad=True, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True),
    "plain_sgd": lambda params: torch.optim.SGD(params, 0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1, fused=True),
}


def trained(make: Any, place: Callable[[Tensor], Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(place(value)) for value in values(0)]
    optimizer = make(params)
    for step in range(3):
        for param, value in zip(params, values(step + 1), strict=True):
            param.grad = place(value)
        optimizer.step()
    return params


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_stays_on_its_ranks(name: str, kind: str) -> None:
    expected = trained(FUSED[name], torch.clone)
    with emulate(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = init_device_mesh("cpu", (2,))
        found = trained(FUSED[name], lambda tensor: placed(tensor, mesh, PLACED[kind]))
        for mine, theirs in zip(found, expected, strict=True):
            # A fused kernel rounds the elements at the end of a tensor in another way.
            torch.testing.assert_close(whole(mine), theirs.detach())
