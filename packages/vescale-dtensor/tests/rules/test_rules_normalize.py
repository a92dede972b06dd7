"""Normalizations and what else runs along dims, against plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import DTensor, distribute_tensor, emulate

from .rule_checks import check, sent_bytes


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    torch.manual_seed(0)
    with emulate(4):
        yield


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


aten = torch.ops.aten


def test_softmax_is_that_of_one_device() -> None:
    for dim in (0, 1, -1):
        check(lambda x, dim=dim: x.softmax(dim), values(6, 5, 8))
        check(lambda x, dim=dim: x.log_softmax(dim), values(6, 5, 8))


@pytest.mark.slow
def test_layer_norm_is_that_of_one_device() -> None:
    for shape, normalized in (((6, 5, 8), (8,)), ((6, 4, 5), (4, 5)), ((8,), (8,))):
        weight, bias = values(*normalized), values(*normalized)
        check(lambda x, n=normalized: F.layer_norm(x, n), values(*shape))
        check(lambda x, w, n=normalized: F.layer_norm(x, n, w), values(*shape), weight)
        check(lambda x, w, b, n=normalized: F.layer_norm(x, n, w, b), values(*shape), weight, bias)


def test_rms_norm_is_that_of_one_device() -> None:
    for shape, normalized in (((6, 5, 8), (8,)), ((6, 4, 5), (4, 5))):
        weight = values(*normalized)
        check(lambda x, n=normalized: F.rms_norm(x, n), values(*shape))
        check(lambda x, w, n=normalized: F.rms_norm(x, n, w, 1e-5), values(*shape), weight)


def test_fused_rms_norm_is_that_of_one_device() -> None:
    x, w = values(6, 5, 8), values(8)
    check(lambda x, w: aten._fused_rms_norm(x, [8], w, 1e-5), x.detach(), w.detach())
    grad = values(6, 5, 8).detach()
    expected = torch.autograd.grad(F.rms_norm(x, (8,), w, 1e-5), (x, w), grad)
    # Without a kernel on this device, only what is cut can be differentiated.
    mesh = init_device_mesh("cpu", (2, 2))
    x, w, grad = (
        distribute_tensor(t.detach(), mesh, (Replicate(), Shard(t.ndim - 1))) for t in (x, w, grad)
    )
    _, rstd = aten._fused_rms_norm(x, [8], w, 1e-5)
    found = aten._fused_rms_norm_backward(grad, x, [8], rstd, w, [True, True])
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each.full_tensor().of_rank(3), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.by_day("shape1", "shape2")
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 6, 2, 3), (6, 6), (5, 6, 4)])
def test_group_norm_is_that_of_one_device(shape: tuple[int, ...]) -> None:
    for groups in (1, 2, 6):
        check(lambda x, g=groups: F.group_norm(x, g), values(*shape))
        check(
            lambda x, w, b, g=groups: F.group_norm(x, g, w, b),
            values(*shape), values(6), values(6),
        )  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(8, 6, 2, 3), (6, 4), (5, 6, 4)])
def test_batch_norm_is_that_of_one_device(shape: tuple[int, ...], *, training: bool) -> None:
    channels = shape[1]

    def function(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Any:
        mean, var = mean.clone(), var.clone()
        return F.batch_norm(x, mean, var, w, b, training=training), mean, var

    mean, var = torch.randn(channels, dtype=torch.float64), torch.rand(channels).double()
    check(function, values(*shape), values(channels), values(channels), mean, var)
    check(lambda x: F.batch_norm(x, None, None, training=True), values(*shape))
    check(lambda x: F.instance_norm(x), values(8, 6, 4))


ALONG: dict[str, Callable[[Tensor], Any]] = {
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: x.cummin(0),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "sort": lambda x: x.sort(1, descending=True),
    "argsort": lambda x: x.argsort(0),
    "topk": lambda x: x.topk(2, 1),
    "flip": lambda x: x.flip((0, 1)),
    "roll": lambda x: x.roll((1, 2), (0, 2)),
    "roll of all": lambda x: x.roll(3),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "diff": lambda x: x.diff(dim=1),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(-1),
    "glu": lambda x: F.glu(x, 2),
    "weight norm": lambda x: torch.ops.aten._weight_norm(x, x[:, :1, :1], 0),
    "trace": lambda x: x[0].trace(),
    "cross": lambda x: torch.linalg.cross(x[:3], x[3:], dim=0),
    "log_sigmoid": lambda x: F.logsigmoid(x),
    "fft": lambda x: torch.view_as_real(torch.fft.fft(x, dim=1)),
    "rfft": lambda x: torch.view_as_real(torch.fft.rfft2(x)),
    "irfft": lambda x: torch.fft.irfft(torch.view_as_complex(torch.stack((x, x), -1)), dim=1),
}


@pytest.mark.parametrize("name", ALONG)
def test_operators_along_dims_are_those_of_one_device(name: str) -> None:
    # A trace is a sum over ranks. Fourier transforms round by how their memory is aligned.
    exact = name not in ("trace", "fft", "rfft", "irfft")
    check(ALONG[name], values(6, 5, 8).detach(), exact=exact)
    check(ALONG[name], values(6, 5, 8), gathers=True)


def test_values_are_looked_up_among_sorted_ones() -> None:
    x = values(6, 5, 8).detach()
    check(lambda x, y: torch.searchsorted(x.sort(-1)[0], y), x, values(6, 5, 3).detach())
    check(lambda x, y: torch.bucketize(x, y.sort()[0]), x, values(9).detach())


def test_triangles_are_cut_in_place() -> None:
    check(lambda x: x.clone().tril_(1), values(6, 5).detach(), exact=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_moments_of_batch_norm_have_the_dtype_of_one_device(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 6, 3).bfloat16(), torch.rand(6).to(dtype)
    settings = (weight, None, None, None, True, 0.1, 1e-5)
    expected = [each.dtype for each in torch.native_batch_norm(x, *settings)]
    mesh = init_device_mesh("cpu", (4,))
    for placement in (Shard(0), Shard(1)):
        results = torch.native_batch_norm(distribute_tensor(x, mesh, (placement,)), *settings)
        assert [each.dtype for each in results] == expected
        for each in results:
            assert isinstance(each, DTensor)
            assert each.to_local().dtype == each.dtype


LINALG: dict[str, Callable[..., Any]] = {
    "inv": torch.linalg.inv,
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 3 * torch.eye(4).to(x)),
    "qr": torch.linalg.qr,
    "svdvals": torch.linalg.svdvals,
    "det": torch.linalg.det,
    "slogdet": torch.linalg.slogdet,
    "eigvalsh": torch.linalg.eigvalsh,
    "matrix_exp": torch.linalg.matrix_exp,
    "lu": torch.linalg.lu,
}


@pytest.mark.parametrize("name", LINALG)
def test_matrices_of_a_batch_are_on_their_own(name: str) -> None:
    x = values(6, 4, 4).detach()
    if name != "cholesky":
        check(LINALG[name], x)
    if name not in ("lu", "qr"):
        check(LINALG[name], x.requires_grad_(), gathers=True)


def test_systems_of_equations() -> None:
    check(torch.linalg.solve, values(6, 4, 4), values(6, 4, 2), gathers=True)
    check(torch.linalg.solve, values(4, 4), values(4), gathers=True)
    check(torch.linalg.solve, values(6, 4, 4), values(6, 4), gathers=True)
    upper = lambda a, b: torch.linalg.solve_triangular(a, b, upper=True)  # noqa: E731
    check(upper, values(6, 4, 4), values(6, 4, 2), gathers=True)


def test_rows_that_are_whole_move_nothing() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(64, 32, requires_grad=True), mesh, (Shard(0),))
    w = distribute_tensor(torch.randn(32, requires_grad=True), mesh, (Replicate(),))
    for function in (
        lambda: x.softmax(1),
        lambda: x.log_softmax(1),
        lambda: F.layer_norm(x, (32,), w, w),
        lambda: F.rms_norm(x, (32,), w),
        lambda: x.cumsum(1),
        lambda: x.sort(1)[0],
        lambda: x.topk(3)[0].detach(),
        lambda: x.detach().tril(),
        lambda: x.flip(1),
    ):
        assert sent_bytes(function) == 0
    assert sent_bytes(lambda: x.softmax(1).sum().backward()) == 0


def test_rows_that_are_cut_move_their_moments() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(64, 512), mesh, (Shard(1),))
    w = distribute_tensor(torch.randn(512), mesh, (Shard(0),))
    rows = 64 * 4
    # Two reductions, each of which sends a small tensor to the other three ranks.
    assert sent_bytes(lambda: x.softmax(1)) <= 6 * rows
    assert sent_bytes(lambda: F.layer_norm(x, (512,), w, w)) <= 6 * rows
    assert sent_bytes(lambda: F.rms_norm(x, (512,), w)) <= 3 * rows


def test_batch_statistics_are_all_that_batch_norm_moves() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(64, 8, 4, 4), mesh, (Shard(0),))
    mean = distribute_tensor(torch.zeros(8), mesh, (Replicate(),))
    var = distribute_tensor(torch.ones(8), mesh, (Replicate(),))
    assert sent_bytes(lambda: F.batch_norm(x, mean, var, training=True)) <= 6 * 8 * 4
    assert sent_bytes(lambda: F.batch_norm(x, mean, var)) == 0


_NORMALIZATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "layer": lambda x, w, b: aten.native_layer_norm(x, [4, 8], w, b, 1e-5),
    "group": lambda x, w, b: aten.native_group_norm(
        x, None if w is None else w[:, 0], None if b is None else b[:, 0], 6, 4, 8, 2, 1e-5
    ),
    "batch": lambda x, w, b: aten.native_batch_norm(
        x, None if w is None else w[:, 0], None if b is None else b[:, 0], None, None, True, 0.1,
        1e-5,
    ),
    "rms": lambda x, w, b: aten._fused_rms_norm(x, [4, 8], w, 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("parameter", [None, torch.float32, "same"], ids=str)
@pytest.mark.parametrize("name", [*_NORMALIZATIONS])
def test_every_result_of_a_normalization_has_the_dtype_it_has_on_one_device(
    name: str, parameter: torch.dtype | str | None, dtype: torch.dtype
) -> None:
    x = torch.randn(6, 4, 8).to(dtype)
    kept = dtype if isinstance(parameter, str) else parameter
    weight = None if kept is None else torch.ones(4, 8, dtype=kept)
    expected = [each.dtype for each in _NORMALIZATIONS[name](x, weight, weight)]
    mesh = init_device_mesh("cpu", (4,))
    whole = None if weight is None else distribute_tensor(weight, mesh, (Replicate(),))
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        spread = distribute_tensor(x, mesh, (placement,))
        results = _NORMALIZATIONS[name](spread, whole, whole)
        assert [each.dtype for each in results] == expected, placement
        assert [each.to_local().dtype for each in results] == expected, placement
