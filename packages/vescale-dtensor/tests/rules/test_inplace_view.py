"""Operators that change the shape of what they write, and results that alias their arguments."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import (
    DTensor,
    GatherWarning,
    RankTensor,
    Unsupported,
    distribute_tensor,
    emulate,
)
from vescale_testing import World

PLACEMENTS: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(1), Shard(2)),
    (Shard(0), Shard(0)),
    (Partial(), Shard(2)),
]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with emulate(4):
        yield init_device_mesh("cpu", (2, 2))


def of_all_ranks(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    full = tensor.full_tensor()
    assert isinstance(full, RankTensor)
    assert all(torch.equal(part, full.parts[0]) for part in full.parts)
    return full.parts[0]


CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.transpose_(0, 2),
    lambda x: x.squeeze_(1),
    lambda x: x.squeeze_(),
    lambda x: x.unsqueeze_(1),
    lambda x: x.swapaxes_(0, 1),
    lambda x: x.as_strided_((2, 3), (3, 1), 1),
]


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_tensor_changed_in_place_keeps_its_views(
    mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    value = torch.randn(6, 1, 6)
    for change in CHANGES:
        plain, part = value.clone(), distribute_tensor(value, mesh, placements)
        views = [(x, x[2], x.flatten()[::7], x.transpose(0, 2)) for x in (plain, part)]
        for each in (plain, part):
            change(each).add_(1)
        assert part.shape == plain.shape
        assert part.stride() == plain.stride()
        for each in views:
            each[1].mul_(3)
            each[2].sub_(1)
            each[0].mul_(2)
        for one, other in zip(*views, strict=True):
            assert torch.equal(of_all_ranks(other), one)


@pytest.mark.filterwarnings("ignore:.*were gathered")
def test_an_empty_out_argument_is_resized(mesh: DeviceMesh) -> None:
    x = torch.randn(5, 3)
    part = distribute_tensor(x, mesh, (Shard(0), Shard(1)))
    for function in (torch.exp, torch.nonzero, lambda t, out: torch.cumsum(t, 0, out=out)):
        expected = function(x, out=torch.empty(0, dtype=function(x, out=None).dtype))
        out = distribute_tensor(
            torch.empty(0, dtype=expected.dtype), mesh, (Replicate(), Replicate())
        )
        result = function(part, out=out)
        assert result is out
        assert torch.equal(of_all_ranks(out), expected)


def test_a_tensor_given_twice_is_one_tensor(mesh: DeviceMesh) -> None:
    x = torch.randn(5, 3)
    part = distribute_tensor(x, mesh, (Shard(0), Shard(1)))
    part.add_(part)
    assert torch.equal(of_all_ranks(part), x + x)


@pytest.mark.filterwarnings("ignore:.*were gathered")
def test_a_plain_out_argument_is_written_once(mesh: DeviceMesh) -> None:
    x = torch.randn(5, 3)
    out = torch.empty(0)
    torch.cumsum(distribute_tensor(x, mesh, (Shard(0), Shard(1))), 0, out=out)
    assert torch.equal(out, x.cumsum(0))


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placements", PLACEMENTS[:4], ids=str)
def test_out_arguments_are_written_through_their_views(
    mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    # matmul and kron write to a view of `out`.
    a, b = torch.randn(6, 4, 4).double(), torch.randn(1, 4, 4).double()
    for function in (torch.matmul, torch.kron):
        expected = function(a, b)
        out = distribute_tensor(torch.zeros_like(expected), mesh, placements)
        left = distribute_tensor(a, mesh, (Shard(0), Shard(2)))
        function(left, distribute_tensor(b, mesh, (Replicate(), Replicate())), out=out)
        torch.testing.assert_close(of_all_ranks(out), expected, rtol=1e-12, atol=1e-12)


def test_sharing_the_storage_of_one_rank_is_refused(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(5, 3), mesh, (Shard(0), Replicate()))
    with pytest.raises(Unsupported, match="unless both tensors are distributed"):
        x.set_(torch.zeros(3))  # pyright: ignore[reportArgumentType]: torch's stub forgets tensors


@pytest.mark.filterwarnings("ignore:.*were gathered")
def test_a_write_that_is_an_error_leaves_a_gathered_view_as_it_was(mesh: DeviceMesh) -> None:
    one = distribute_tensor(torch.ones(1), mesh, (Shard(0), Replicate()))
    view = one.expand(2, 1).reshape(-1)
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        view.add_(1)
    assert torch.equal(of_all_ranks(view), torch.ones(2))


def test_gradients_flow_through_writes_to_gathered_views(mesh: DeviceMesh) -> None:
    value = torch.randn(6, 6)

    def loss(x: Tensor) -> Tensor:
        y = x * 1
        y.diagonal(1).mul_(3)
        y[2:4].mul_(2)
        y.diagonal(-2)[1:].mul_(5)
        y.unfold(0, 2, 3).mul_(0.5)
        return (y * torch.arange(36.0).view(6, 6)).sum()

    plain = value.clone().requires_grad_()
    loss(plain).backward()
    for placements in PLACEMENTS[:2]:
        part = distribute_tensor(value, mesh, placements).requires_grad_()
        loss(part).backward()
        assert part.grad is not None
        assert plain.grad is not None
        assert torch.equal(of_all_ranks(part.grad), plain.grad)


def _check_on_ranks() -> None:
    mesh = init_device_mesh("cpu", (4,))
    value = torch.randn(
        6, 1, 5, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)
    )
    for placements in ((Replicate(),), (Shard(1),), (Shard(2),), (Partial(),)):
        results: list[list[Tensor]] = []
        for x in (value.clone(), distribute_tensor(value, mesh, placements)):
            view, conjugate = x.flatten()[::7], x.conj()
            x.squeeze_(1).t_().mul_(2)
            conjugate.add_(1j)
            out = torch.empty(0, dtype=x.dtype)
            torch.cumsum(x, 0, out=out)
            results.append([x, view, conjugate, torch.linalg.pinv(x), out])
        for expected, result in zip(*results, strict=True):
            full = result.full_tensor() if isinstance(result, DTensor) else result
            # Ranks add the parts of a pending sum in an order of their own.
            torch.testing.assert_close(full, expected.resolve_conj(), rtol=1e-12, atol=1e-12)


def _check_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        _check_on_ranks()


def test_changes_in_place_are_the_same_on_processes(world4: World) -> None:
    world4.run(_check_without_warnings)
