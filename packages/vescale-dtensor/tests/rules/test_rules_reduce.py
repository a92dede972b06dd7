"""Reductions of distributed tensors against those of plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Shard

from vescale_dtensor import DTensor, RankTensor, distribute_tensor, emulate

from .rule_checks import check, sent_bytes

Function = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    torch.manual_seed(0)
    with emulate(4):
        yield


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def placements_of(result: Tensor) -> tuple[Placement, ...]:
    assert isinstance(result, DTensor)
    return result.placements


DIFFERENTIABLE: dict[str, Function] = {
    "sum": lambda x: x.sum(),
    "sum of a dim": lambda x: x.sum(0),
    "sum of dims": lambda x: x.sum((0, -1), keepdim=True),
    "mean": lambda x: x.mean(),
    "mean of a dim": lambda x: x.mean(-1),
    "mean of dims": lambda x: x.mean((0, 1), keepdim=True),
    "nansum": lambda x: x.nansum(1),
    "prod": lambda x: x.prod(1),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((0, 2), keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of a dim": lambda x: x.max(0),
    "min of a dim": lambda x: x.min(1, keepdim=True),
    "aminmax": lambda x: tuple(x.aminmax(dim=1)),
    "var": lambda x: x.var((0, 1)),
    "var of all": lambda x: x.var(correction=0),
    "std": lambda x: x.std(1, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, 0, correction=2),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "logsumexp of a dim": lambda x: x.logsumexp(1, keepdim=True),
    "2-norm": lambda x: torch.linalg.vector_norm(x, 2, 1),
    "1-norm": lambda x: torch.linalg.vector_norm(x, 1, (0, 2)),
    "3-norm": lambda x: torch.linalg.vector_norm(x, 3, 0, keepdim=True),
    "maximum norm": lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
    "norm of old": lambda x: torch.norm(x, 2, 1),
}
VALUES_ONLY: dict[str, Function] = {
    "any": lambda x: (x > 1).any(),
    "any of a dim": lambda x: (x > 1).any(0),
    "all of dims": lambda x: (x > -1).all((0, 1)),
    "all": lambda x: (x > -9).all(),
    "count_nonzero": lambda x: x.relu().count_nonzero(1),
    "count_nonzero of all": lambda x: x.relu().count_nonzero(),
    "argmax": lambda x: x.argmax(),
    "argmax of a dim": lambda x: x.argmax(1, keepdim=True),
    "argmin": lambda x: x.argmin(0),
    "0-norm": lambda x: torch.linalg.vector_norm(x.relu(), 0, 1),
    "least norm": lambda x: torch.linalg.vector_norm(x, -float("inf"), 1),
    "sum of integers": lambda x: (x * 9).to(torch.int32).sum(1),
    "amax of integers": lambda x: (x * 9).to(torch.int32).amax(1),
    "sum of booleans": lambda x: (x > 0).sum(0),
}

if torch.__version__ < "2.12":  # which lacks its gradient
    VALUES_ONLY["aminmax"] = DIFFERENTIABLE.pop("aminmax")

# Autograd writes into what is pending, or makes zeros of another shape from it.
GATHER_BACKWARD = ("prod", "2-norm", "norm of old", "max of a dim", "min of a dim")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_reductions_and_their_gradients_are_those_of_one_device(name: str) -> None:
    check(DIFFERENTIABLE[name], values(6, 5, 3), gathers=name in GATHER_BACKWARD)


@pytest.mark.parametrize("name", VALUES_ONLY)
def test_reductions_that_have_no_gradient_are_those_of_one_device(name: str) -> None:
    check(VALUES_ONLY[name], values(6, 5, 3).detach())


@pytest.mark.parametrize("name", ["median", "mode", "kthvalue"])
def test_what_needs_all_of_a_dim_gathers_that_dim_only(name: str) -> None:
    function = {
        "median": lambda x: x.median(1),
        "mode": lambda x: x.mode(0),
        "kthvalue": lambda x: x.kthvalue(2, 1),
    }[name]
    check(function, values(6, 5, 3), gathers=True)
    check(function, values(6, 5, 3).detach())


def test_extremes_of_numbers_that_are_none_are_not_numbers() -> None:
    x = values(6, 5).detach()
    x[4, 3] = float("nan")
    check(lambda x: (x.amax(0), x.min(), x.max(0), x.argmax(), x.argmin(1)), x)


def test_first_of_equal_elements_is_found() -> None:
    x = torch.tensor([[1.0, 3, 2], [3, 0, 3], [0, 3, 3], [3, 3, 3]], dtype=torch.float64)
    check(lambda x: (x.argmax(), x.argmax(0), x.argmin(1)), x)


def test_logarithm_of_sums_of_infinite_exponentials() -> None:
    x = values(6, 5).detach()
    x[2], x[:, 3] = -float("inf"), float("inf")
    check(lambda x: (x.logsumexp(0), x.logsumexp(1)), x)


def test_logsumexp_of_complex_numbers_goes_by_their_real_parts() -> None:
    x = torch.randn(6, 5, dtype=torch.complex128)
    x[2, 3] = torch.tensor(900 + 1j)  # overflows unless it is subtracted
    check(lambda x: (x.logsumexp(0), x.logsumexp(1)), x)


def test_reductions_of_parts_move_what_is_reduced() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(64, 32), mesh, (Shard(0),))
    for function in (torch.sum, torch.mean, torch.amax, torch.prod, torch.max):
        assert sent_bytes(function, x) == 0
    for function in (lambda x: x.sum(1), lambda x: x.var(1), lambda x: x.median(1),
                     lambda x: torch.linalg.vector_norm(x, dim=1)):  # fmt: skip
        assert sent_bytes(function, x) == 0
    assert placements_of(x.var(1)) == (Shard(0),)
    assert placements_of(x.mean(0)) == (Partial(),)
    columns = 32 * 4
    # Two reductions, each of which sends a small tensor to the other three ranks.
    assert sent_bytes(lambda x: x.var(0), x) <= 6 * columns
    assert sent_bytes(lambda x: x.logsumexp(0), x) <= 6 * columns
    assert sent_bytes(lambda x: x.argmax(0), x) <= 9 * columns


def test_pending_sums_stay_pending_in_sums_and_means() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(8, 4), mesh, (Partial(),))
    assert sent_bytes(lambda x: (x.sum(0), x.mean(), x.mean(1)), x) == 0
    assert placements_of(x.mean(1)) == (Partial(),)
    assert sent_bytes(lambda x: x.amax(0), x) > 0


def test_half_precision_is_rounded_once_a_rank_and_once_again() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = torch.randn(64, 8, dtype=torch.bfloat16)
    parts = distribute_tensor(x, mesh, (Shard(0),))
    mean = parts.mean(0).full_tensor().of_rank(3)  # pyright: ignore[reportAttributeAccessIssue]: emulated
    exact = x.double().mean(0)
    # Half a unit in the last place of each of the parts' means and of the result.
    bound = 2 * 2.0**-9 * x.double().view(4, 16, 8).sum(1).abs().sum(0) / 64 + 1e-6
    assert bool(((mean.double() - exact).abs() <= bound).all())


def test_means_of_large_half_precision_numbers_do_not_overflow() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.full((64,), 6e4, dtype=torch.float16), mesh, (Shard(0),))
    assert x.mean().item() == torch.tensor(6e4, dtype=torch.float16).item()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_reductions_of_nothing_are_what_they_are_on_one_device() -> None:
    nothing = torch.empty(0, 5, dtype=torch.float64)
    for function in (torch.sum, torch.mean, torch.prod, torch.any):
        check(function, nothing)
    check(lambda x: (x.var(0), x.std(), x.var(1), x.sum(0), x.mean(0), x.logsumexp(0)), nothing)


@pytest.mark.parametrize("order", [float("inf"), 1.0, 2.0, 3.0])
def test_the_gradient_of_a_distance_of_pending_sums_is_that_of_the_sums(order: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for seed in range(8):
        torch.manual_seed(seed)
        terms, other = (
            torch.randn(4, 6, 5, dtype=torch.float64),
            torch.randn(5, dtype=torch.float64),
        )
        pending: Any = DTensor.from_local(
            RankTensor(list(terms)), mesh, [Partial(), Partial()], shape=(6, 5)
        ).requires_grad_()
        whole: Any = ((terms[0] + terms[1]) + (terms[2] + terms[3])).requires_grad_()
        expected: Any = torch.dist(whole, other, order)
        found: Any = torch.dist(pending, other, order)
        for value in (expected, found):
            value.backward()
        # float64: the norm is added up in another order.
        assert torch.allclose(found.full_tensor(), expected, rtol=1e-12)
        assert torch.allclose(pending.grad.full_tensor(), whole.grad, rtol=1e-12)
