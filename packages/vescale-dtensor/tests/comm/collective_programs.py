"""Programs of four ranks, run on emulated ones, and what their values are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import all_gather, all_reduce, all_to_all, emulate, reduce_scatter
from vescale_dtensor._comm.emulation import RankTensor, is_emulated

RANKS = 4
SIZES = (2, 0, 5, 1)
# What each rank sends to each; the columns are what each receives.
SPLITS = ((1, 0, 2, 3), (0, 0, 0, 0), (4, 1, 0, 1), (0, 2, 1, 0))

Program = Callable[[DeviceMesh], Tensor]


def _local(make: Callable[[int], Tensor]) -> Tensor:
    """What ``make`` gives for this rank, or for all emulated ones."""
    if is_emulated():
        return RankTensor([make(rank) for rank in range(dist.get_world_size())])
    return make(dist.get_rank())


def _value(rank: int, shape: Sequence[int] = (37,), dtype: torch.dtype = torch.float32) -> Tensor:
    """Magnitudes differ between ranks, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(rank)
    scale = (1.0, 1e4, 1e-4, 1e2)[rank % 4]
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


def _whole(rank: int, shape: Sequence[int]) -> Tensor:
    """Small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-3, 4, tuple(shape), generator=generator).double()


def ones(*shape: int) -> Tensor:
    return _local(lambda _: torch.ones(shape))


def different_shapes() -> Tensor:
    return _local(lambda rank: torch.ones(1 + rank))


def emulated(program: Program, mesh_shape: tuple[int, ...] = (RANKS,)) -> list[Tensor]:
    with emulate(math.prod(mesh_shape)):
        found = program(init_device_mesh("cpu", mesh_shape))
        return list(cast(RankTensor, found).parts)


def _in_order(values: Sequence[Tensor]) -> Tensor:
    wide = torch.float32 if values[0].dtype is torch.bfloat16 else values[0].dtype
    total = values[0].to(wide)
    for value in values[1:]:
        total = total + value.to(wide)
    return total.to(values[0].dtype)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def _splits(mesh: DeviceMesh) -> dict[str, Any]:
    del mesh
    return {
        "input_splits": _local(lambda rank: torch.tensor(SPLITS[rank])),
        "output_splits": _local(lambda rank: torch.tensor([row[rank] for row in SPLITS])),
    }


def _sent(values: Sequence[Tensor], rank: int) -> Tensor:
    parts = [value.split(list(SPLITS[peer]))[rank] for peer, value in enumerate(values)]
    return torch.cat(parts)


def _plain_all_reduce(values: Sequence[Tensor]) -> list[Tensor]:
    return [_in_order(values)] * RANKS


def _plain_avg(values: Sequence[Tensor]) -> list[Tensor]:
    return [_in_order(values) / RANKS] * RANKS


def _plain_reduce_scatter(values: Sequence[Tensor]) -> list[Tensor]:
    return list(_in_order(values).unbind())


def _plain_avg_scatter(values: Sequence[Tensor]) -> list[Tensor]:
    return list((_in_order(values) / RANKS).unbind())


def _plain_scatter_sizes(values: Sequence[Tensor]) -> list[Tensor]:
    return list(_in_order(values).split(list(SIZES)))


def _plain_all_gather(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(values))] * RANKS


def _plain_gather_sizes(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(values))] * RANKS


def _plain_even(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([value.chunk(RANKS)[rank] for value in values]) for rank in range(RANKS)]


def _plain_uneven(values: Sequence[Tensor]) -> list[Tensor]:
    return [_sent(values, rank) for rank in range(RANKS)]


def _library_all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return all_reduce(x, mesh, order="library")


def _avg(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return all_reduce(x, mesh, op="avg")


def _avg_scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce_scatter(x, mesh, op="avg")


def _library_scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce_scatter(x, mesh, order="library")


def _scatter_sizes(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce_scatter(x, mesh, sizes=SIZES)


def _library_scatter_sizes(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce_scatter(x, mesh, sizes=SIZES, order="library")


def _gather_sizes(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return all_gather(x, mesh, sizes=SIZES)


def _uneven(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return all_to_all(x, mesh, **_splits(mesh))


Collective = Callable[[Tensor, DeviceMesh], Tensor]
Plain = Callable[[Sequence[Tensor]], list[Tensor]]
# Each with what one device does in its place, and the shape of every rank's input.
CASES: dict[str, tuple[Collective, Plain, Sequence[tuple[int, ...]]]] = {
    "all_reduce": (all_reduce, _plain_all_reduce, [(5, 3)] * RANKS),
    "all_reduce of a scalar": (all_reduce, _plain_all_reduce, [()] * RANKS),
    "all_reduce by the library": (_library_all_reduce, _plain_all_reduce, [(5, 3)] * RANKS),
    "average": (_avg, _plain_avg, [(5, 3)] * RANKS),
    "reduce_scatter": (reduce_scatter, _plain_reduce_scatter, [(4, 3)] * RANKS),
    "reduce_scatter by the library": (_library_scatter, _plain_reduce_scatter, [(4, 3)] * RANKS),
    "average and scatter": (_avg_scatter, _plain_avg_scatter, [(4, 3)] * RANKS),
    "uneven reduce_scatter": (_scatter_sizes, _plain_scatter_sizes, [(sum(SIZES), 3)] * RANKS),
    "uneven reduce_scatter by the library": (
        _library_scatter_sizes,
        _plain_scatter_sizes,
        [(sum(SIZES), 3)] * RANKS,
    ),
    "all_gather": (all_gather, _plain_all_gather, [(2, 3)] * RANKS),
    "uneven all_gather": (_gather_sizes, _plain_gather_sizes, [(size, 3) for size in SIZES]),
    "all_to_all": (all_to_all, _plain_even, [(8, 3)] * RANKS),
    "uneven all_to_all": (_uneven, _plain_uneven, [(sum(row), 3) for row in SPLITS]),
}


def _output_shapes(case: str) -> list[torch.Size]:
    _, plain, shapes = CASES[case]
    return [out.shape for out in plain([torch.zeros(shape) for shape in shapes])]


def _gradients(case: str, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """The output, its gradient, and the gradient of that."""
    collective, _, shapes = CASES[case]
    outputs = _output_shapes(case)
    x = _local(lambda rank: _whole(rank, shapes[rank])).requires_grad_()
    weight = _local(lambda rank: _whole(10 + rank, outputs[rank]))
    direction = _local(lambda rank: _whole(20 + rank, shapes[rank]))
    y = collective(x, mesh)
    (grad,) = torch.autograd.grad(y**2, x, weight, create_graph=True)
    (second,) = torch.autograd.grad(grad * x, x, direction)
    return y.detach(), grad.detach(), second


def plain_gradients(case: str) -> list[tuple[Tensor, ...]]:
    _, plain, shapes = CASES[case]
    xs = [_whole(rank, shape).requires_grad_() for rank, shape in enumerate(shapes)]
    ys = plain(xs)
    weights = [_whole(10 + rank, y.shape) for rank, y in enumerate(ys)]
    loss = sum((y**2 * w).sum() for y, w in zip(ys, weights, strict=True))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, xs, create_graph=True)
    directions = [_whole(20 + rank, shape) for rank, shape in enumerate(shapes)]
    again = sum((g * x * d).sum() for g, x, d in zip(grads, xs, directions, strict=True))
    assert isinstance(again, Tensor)
    return list(zip(ys, grads, torch.autograd.grad(again, xs), strict=True))


def all_bits(mesh: DeviceMesh) -> list[Tensor]:
    """Every collective there is, where rounding shows."""
    results: list[Tensor] = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        for shape in ((37,), (), (0, 3), (8, 5)):
            value = _local(lambda rank, s=shape, d=dtype: _value(rank, s, d))
            results += [all_reduce(value, mesh), all_gather(value, mesh)]
        value = _local(lambda rank, d=dtype: _value(rank, (8, 6), d))
        results += [reduce_scatter(value.view(4, 2, 6), mesh), all_to_all(value.t()[:4], mesh)]
        for op in ("max", "min", "product"):
            results += [all_reduce(value, mesh, op=op)]
            results += [all_reduce(value.sign(), mesh, op=op, order="library")]
    for case in CASES:
        results += _gradients(case, mesh)
    return results
