"""Emulated ranks that are given one plain tensor do not write into each other's elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import DTensor, RankTensor, distribute_tensor, emulate


@pytest.fixture(params=[2, 3])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    with emulate(request.param):
        yield init_device_mesh("cpu", (request.param,))


def _parts(tensor: Any) -> tuple[Tensor, ...]:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.parts if isinstance(tensor, RankTensor) else (tensor,)


WRITES: list[Callable[[Any], Any]] = [
    lambda x: x.mul_(2),
    lambda x: x.view(-1, 6).mul_(2),
    lambda x: x[1:3].add_(1),
    lambda x: x.view(-1)[::2].mul_(3),
    lambda x: x.narrow(0, 2, 4).sub_(1),
    lambda x: x.unsqueeze(0).index_add_(1, torch.tensor([0, 0]), torch.ones(1, 2)),
    lambda x: x.to_local().add_(1),
    lambda x: x.to_local().view(-1)[:2].mul_(5),
    lambda x: x.detach().view(-1, 4)[0].mul_(2),
    lambda x: x.data.add_(1),
    lambda x: torch.ops.aten._foreach_mul_.Scalar([x, x.view(-1)], 2),
]


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=str)
def test_a_write_happens_once(mesh: DeviceMesh, placement: Placement) -> None:
    for write in WRITES:
        plain = torch.arange(12.0)
        part = DTensor.from_local(plain, mesh, (placement,))
        own = DTensor.from_local(
            RankTensor([torch.arange(12.0) for _ in range(mesh.size())]), mesh, (placement,)
        )
        write(part)
        write(own)
        for got, wanted in zip(_parts(part), _parts(own), strict=True):
            assert torch.equal(got, wanted)
        # This rank's elements are those it was given, as in a process of its own.
        assert torch.equal(plain, _parts(own.to_local())[0])


def test_parts_of_other_strides_are_copied_as_they_are(mesh: DeviceMesh) -> None:
    for plain in (torch.arange(12.0).view(3, 4).t(), torch.arange(24.0).view(4, 6)[:, ::2]):
        part = DTensor.from_local(plain, mesh, (Replicate(),))
        part.mul_(2)
        assert part.stride() == plain.stride()
        assert all(torch.equal(each, plain) for each in _parts(part))
    expanded = DTensor.from_local(torch.ones(1, 3).expand(2, 3), mesh, (Replicate(),))
    assert expanded.stride() == (0, 1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "irfft": lambda x: torch.fft.irfft(x),
    "irfft of five": lambda x: torch.fft.irfft(x, 5),
    "hfft": lambda x: torch.fft.hfft(x),
    "irfft2": lambda x: torch.fft.irfft2(x),
    "as_strided": lambda x: x.as_strided((3, 4), (1, 2)),
    "as_strided, overlapping": lambda x: x.as_strided((2, 4, 2), (5, 1, 1)),
    "a write to a copy": lambda x: x.clone().index_fill_(0, torch.tensor([1]), 0),
    "index": lambda x: x[torch.tensor([0, 0, 1])],
    "cumprod": lambda x: x.cumprod(0),
}


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_plain_cotangents_are_those_of_every_rank(
    mesh: DeviceMesh, name: str, placement: Placement
) -> None:
    function = FUNCTIONS[name]
    full = torch.randn(4, 5, dtype=torch.complex128)
    plain = full.clone().requires_grad_()
    expected = function(plain)
    cotangent = torch.randn_like(expected)
    before = cotangent.clone()
    (wanted,) = torch.autograd.grad(expected, plain, cotangent)
    part: Any = distribute_tensor(full, mesh, (placement,)).requires_grad_()
    whole = (Replicate(),)
    made: Any = function(part)
    of_whole: Any = function(part.redistribute(placements=whole))
    given = full.clone().requires_grad_()
    held = DTensor.from_local(given, mesh, whole)
    for result, source in (
        (function(part), part),
        (function(part.full_tensor()), part),
        (made.full_tensor(), part),
        (made.redistribute(placements=whole), part),
        (of_whole.to_local(), part),
        (function(held), given),
        (function(held.to_local()), given),
    ):
        (gradient,) = torch.autograd.grad(result, source, cotangent, retain_graph=True)
        for each in _parts(gradient):
            # The sums of transforms are cut elsewhere.
            torch.testing.assert_close(each, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(cotangent, before)


def test_values_that_all_ranks_have_are_listed(mesh: DeviceMesh) -> None:
    values = torch.tensor([[1.0, float("nan")], [3.0, 4.0]])
    part = distribute_tensor(values, mesh, (Shard(0),))
    assert str(part.tolist()) == str(values.tolist())
    assert str(part.sum().item()) == "nan"
    assert part[1].sum().tolist() == 7.0
    with pytest.raises(RuntimeError, match="emulated ranks disagree"):
        part.to_local().tolist()
