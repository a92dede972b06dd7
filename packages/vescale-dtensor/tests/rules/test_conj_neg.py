"""Complex numbers: conj() is a bit that torch does not carry through a subclass."""

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import DTensor, RankTensor, distribute_tensor, emulate
from vescale_testing import World

PLACEMENTS: list[tuple[Placement, ...]] = [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with emulate(4):
        yield init_device_mesh("cpu", (4,))


def of_all_ranks(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    full = cast(DTensor, tensor.detach()).full_tensor()
    assert isinstance(full, RankTensor)
    assert all(torch.equal(part, full.parts[0]) for part in full.parts)
    return full.parts[0]


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.conj(),
    lambda x: x.conj().imag,
    lambda x: x.mH @ x,
    lambda x: torch.linalg.pinv(x),
    lambda x: torch.fft.hfft(x),
    lambda x: torch.view_as_real(x.conj().resolve_conj()),
    lambda x: x.conj().mul(x).T.sum(0),
]


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_conjugates_and_their_gradients_are_those_of_one_device(
    mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    value = torch.randn(5, 5, dtype=torch.complex128)
    for function in FUNCTIONS:
        plain = value.clone().requires_grad_()
        part = distribute_tensor(value, mesh, placements).requires_grad_()
        expected, result = function(plain), function(part)
        # Products and sums of parts round differently than those of the whole.
        torch.testing.assert_close(of_all_ranks(result), expected.detach(), rtol=1e-9, atol=1e-9)
        (wanted,) = torch.autograd.grad(expected.abs().sum(), plain)
        (got,) = torch.autograd.grad(result.abs().sum(), part)
        torch.testing.assert_close(of_all_ranks(got), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_conjugate_is_a_view(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    value = torch.randn(5, 3, dtype=torch.complex128)
    results: list[list[Tensor]] = []
    for x in (value.clone(), distribute_tensor(value, mesh, placements)):
        conjugate, imaginary = x.conj(), x.conj().imag
        conjugate[1].mul_(2)
        x.add_(1j)
        imaginary[:, 2].zero_()
        results.append([x, conjugate, imaginary])
    for expected, result in zip(*results, strict=True):
        assert torch.equal(of_all_ranks(result), expected.resolve_conj().resolve_neg())


def _check_on_ranks() -> None:
    mesh = init_device_mesh("cpu", (4,))
    value = torch.randn(8, 8, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(8, 8, dtype=torch.float64)
    for local in (value.conj(), value.conj().imag):
        for placements, whole in (((Replicate(),), local), ((Shard(0),), torch.cat([local] * 4))):
            part = DTensor.from_local(local, mesh, placements)
            for result in (part, part.redistribute(mesh, (Shard(1),)), (part + 1) - 1):
                torch.testing.assert_close(result.full_tensor(), whole.resolve_conj() * 1)  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
        for placements in ((Replicate(),), (Shard(0),)):
            sums = distribute_tensor(ones, mesh, placements) + local
            torch.testing.assert_close(cast(DTensor, sums).full_tensor(), ones + local)


def test_plain_tensors_with_lazy_bits_count_as_what_they_show(world4: World) -> None:
    world4.run(_check_on_ranks)
