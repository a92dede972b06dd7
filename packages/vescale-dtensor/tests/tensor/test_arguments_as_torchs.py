"""Arguments that a program written for torch's distributed tensors passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import vescale_dtensor
from vescale_dtensor import (
    CommCounter,
    DTensor,
    RankTensor,
    distribute_module,
    distribute_tensor,
    emulate,
)
from vescale_testing import World


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with emulate(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def _part(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(full, mesh, [Shard(0)]).to_local()


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("full_order", ["C", "F"])
@pytest.mark.parametrize("part_order", ["C", "F"])
def test_a_part_is_laid_out_as_the_strides_of_the_whole_say(
    mesh: DeviceMesh, rows: int, full_order: str, part_order: str
) -> None:
    full, part_of = torch.randn(rows, 6), torch.randn(rows, 6)
    full = full if full_order == "C" else full.t().contiguous().t()
    part_of = part_of if part_order == "C" else part_of.t().contiguous().t()
    part = _part(part_of.copy_(full), mesh).requires_grad_()
    how: Any = {"shape": full.shape, "stride": full.stride()}
    made = DTensor.from_local(part, mesh, [Shard(0)], **how)
    assert made.stride() == full.stride()
    assert torch.equal(made.full_tensor(), full)
    (grad,) = torch.autograd.grad((made * full).sum(), part)
    assert isinstance(grad, RankTensor)
    assert torch.equal(torch.cat(grad.parts), full)


def test_strides_without_the_shape_they_are_of_are_refused(mesh: DeviceMesh) -> None:
    part = torch.ones(2, 3)
    given: list[Any] = [{"stride": (3, 1)}, {"shape": (4, 3), "stride": (1,)}]
    for how in given:
        with pytest.raises(ValueError, match="strides of one per dim of shape="):
            DTensor.from_local(part, mesh, [Shard(0)], **how)


def test_what_is_to_be_asynchronous_has_its_values(mesh: DeviceMesh) -> None:
    full = torch.randn(6, 2)
    made = distribute_tensor(full, mesh, [Shard(0)])
    assert torch.equal(made.redistribute(mesh, [Replicate()], async_op=True).to_local(), full)


def test_a_dtype_of_forward_is_that_of_what_is_sent_and_returned(mesh: DeviceMesh) -> None:
    full = torch.randn(6, 4)
    for requires_grad in (False, True):
        made = distribute_tensor(full.clone().requires_grad_(requires_grad), mesh, [Shard(0)])
        with CommCounter() as counter:
            whole = made.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
        assert {event.dtype for event in counter.events} == {torch.bfloat16}
        assert whole.dtype == torch.bfloat16
        assert torch.equal(whole.to_local(), full.to(torch.bfloat16))
        assert made.dtype == torch.float32


def test_terms_of_a_sum_are_cast_before_they_are_sent(mesh: DeviceMesh) -> None:
    terms = torch.randn(2, 3, 4)
    pending = DTensor.from_local(RankTensor(list(terms)), mesh, [Partial()], shape=(3, 4))
    with CommCounter() as counter:
        total = pending.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
    assert {event.dtype for event in counter.events} == {torch.bfloat16}
    rounded = terms.to(torch.bfloat16).float()
    assert torch.equal(total.to_local(), (rounded[0] + rounded[1]).to(torch.bfloat16))


@pytest.mark.parametrize("backward_dtype", [None, torch.bfloat16])
def test_a_dtype_of_backward_is_that_in_which_gradients_are_sent(
    mesh: DeviceMesh, backward_dtype: torch.dtype | None
) -> None:
    weight = torch.randn(6, 4, dtype=torch.float64)
    x: Any = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]).requires_grad_()
    dtypes: Any = {"forward_dtype": torch.float64, "backward_dtype": backward_dtype}
    whole = x.redistribute(placements=[Replicate()], **dtypes)
    with CommCounter() as counter:
        (whole.to_local(grad_placements=[Partial()]) * weight).sum().backward()
    sent_as = backward_dtype or torch.float32
    assert {event.dtype for event in counter.events} == {sent_as}
    assert isinstance(x.grad, DTensor)
    assert (x.grad.dtype, x.grad.placements) == (torch.float32, (Shard(0),))
    assert torch.equal(x.grad.full_tensor(), 2 * weight.to(sent_as).float())


def test_casts_of_redistribution_have_second_derivatives(mesh: DeviceMesh) -> None:
    values = torch.arange(1.0, 7.0)
    x: Any = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Replicate()], forward_dtype=torch.float64)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(first.full_tensor(), 3 * values**2)
    assert torch.equal(second.full_tensor(), 6 * values)


@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn", "full"])
def test_factories_take_the_layout_that_there_is(mesh: DeviceMesh, name: str) -> None:
    factory: Callable[..., DTensor] = getattr(vescale_dtensor, name)
    size: Any = ((3, 2), 1.5) if name == "full" else (3, 2)
    made = factory(*size, layout=torch.strided, device_mesh=mesh, placements=[Shard(0)])
    assert (made.shape, made.layout) == ((3, 2), torch.strided)
    with pytest.raises(ValueError, match=r"expected layout=torch\.strided"):
        factory(*size, layout=torch.sparse_coo, device_mesh=mesh)


def test_what_was_computed_is_not_cut_off_from_its_gradient(mesh: DeviceMesh) -> None:
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match="expected a leaf of autograd"):
        distribute_tensor(x * 2, mesh, [Shard(0)])
    assert distribute_tensor((x * 2).detach(), mesh, [Shard(0)]).tolist() == [2.0] * 4


def test_functions_of_two_arguments_around_a_module_are_called_with_a_warning(
    mesh: DeviceMesh,
) -> None:
    def wrapped(inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()])

    def unwrapped(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return outputs.to_local()

    of_two: Any = wrapped
    of_one: Any = len
    plain, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = plain(x)
    with pytest.warns(FutureWarning, match="input_fn of two arguments"):
        made = distribute_module(plain, mesh, input_fn=of_two, output_fn=unwrapped)
    assert torch.equal(made(x), expected)
    with pytest.warns(FutureWarning, match="output_fn of two arguments"):
        distribute_module(nn.Linear(3, 2), mesh, output_fn=of_two)
    with pytest.raises(ValueError, match="expected input_fn of a module, values and a mesh"):
        distribute_module(nn.Linear(3, 2), mesh, input_fn=of_one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distribute_module(nn.Linear(3, 2), mesh, output_fn=lambda *given: given[1])


def _check_ranks_that_differ() -> None:
    mesh = init_device_mesh("cpu", (4,))
    first = mesh.get_rank() == 0
    square = torch.ones(3, 3)
    for part in (
        square.double() if first else square,
        square.clone().requires_grad_(first),
        square.t().contiguous().t() if first else square,
    ):
        with pytest.raises(ValueError, match="expected parts of one dtype"):
            DTensor.from_local(part, mesh, [Shard(0)], run_check=True)
    uneven = torch.ones(3 - first, 3).t().contiguous().t()
    assert DTensor.from_local(uneven, mesh, [Shard(0)], run_check=True).shape == (11, 3)


def test_a_check_finds_ranks_whose_parts_differ_in_more_than_values(world4: World) -> None:
    world4.run(_check_ranks_that_differ)


@pytest.mark.parametrize("kind", ["avg", "max", "min", "product"])
def test_the_gradient_of_a_result_is_not_taken_for_that_of_a_term(
    mesh: DeviceMesh, kind: str
) -> None:
    terms = torch.tensor([[1.0, 5.0], [3.0, 2.0]])
    result = {"avg": terms.mean(0), "max": terms.amax(0), "min": terms.amin(0)}
    part = RankTensor(list(terms)).requires_grad_()
    made = DTensor.from_local(part, mesh, [Partial(kind)], shape=(2,))
    assert torch.equal(made.full_tensor(), result.get(kind, terms.prod(0)))
    with pytest.raises(NotImplementedError, match="only terms of a sum share"):
        torch.autograd.grad(made.full_tensor().sum(), part)
    told = DTensor.from_local(
        part, mesh, [Partial(kind)], shape=(2,), grad_placements=[Replicate()]
    )
    (grad,) = torch.autograd.grad(told.full_tensor().sum(), part)
    assert grad.tolist() == [1.0, 1.0]
