"""Collectives against sums written out on one device, emulated and between processes.

A program is run on emulated ranks, where it is compared with plain torch, and by four
processes, where it has to have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import all_gather, all_reduce, all_to_all, emulate, reduce_scatter
from vescale_dtensor._comm.emulation import RankTensor, is_emulated
from vescale_dtensor._comm.events import Communication, listening
from vescale_testing import World

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


def _ones(*shape: int) -> Tensor:
    return _local(lambda _: torch.ones(shape))


def _different() -> Tensor:
    return _local(lambda rank: torch.ones(1 + rank))


def _emulated(program: Program, mesh_shape: tuple[int, ...] = (RANKS,)) -> list[Tensor]:
    with emulate(math.prod(mesh_shape)):
        found = program(init_device_mesh("cpu", mesh_shape))
        return list(cast(RankTensor, found).parts)


def _in_order(values: Sequence[Tensor]) -> Tensor:
    wide = torch.float32 if values[0].dtype is torch.bfloat16 else values[0].dtype
    total = values[0].to(wide)
    for value in values[1:]:
        total = total + value.to(wide)
    return total.to(values[0].dtype)


def _assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# Values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(37,), (), (0, 3), (3, 1), (8, 5)])
def test_all_reduce_adds_in_rank_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = [_value(rank, shape, dtype) for rank in range(RANKS)]
    found = _emulated(lambda mesh: all_reduce(_local(values.__getitem__), mesh))
    _assert_equal(found, [_in_order(values)] * RANKS)


@pytest.mark.parametrize("order", ["rank", "library"])
def test_other_reductions_are_those_of_torch(order: Any) -> None:
    values = torch.stack([_value(rank) for rank in range(RANKS)])
    expected = {
        "avg": _in_order(values.unbind()) / RANKS,
        "max": values.amax(0),
        "min": values.amin(0),
        "product": values[0] * values[1] * values[2] * values[3],
    }
    for op, value in expected.items():
        found = _emulated(
            lambda mesh, op=op: all_reduce(
                _local(values.__getitem__), mesh, op=cast(Any, op), order=order
            )
        )
        _assert_equal(found, [value] * RANKS)


def test_sums_are_added_up_in_the_dtype_asked_for() -> None:
    values = [torch.tensor([x]) for x in (1.0, 1e8, -1e8, 0.0)]
    asked = _emulated(
        lambda mesh: all_reduce(_local(values.__getitem__), mesh, accumulate=torch.float64)
    )
    assert asked[0].item() == 1.0
    assert _emulated(lambda mesh: all_reduce(_local(values.__getitem__), mesh))[0].item() == 0.0


def test_a_tensor_that_is_not_contiguous_is_read_as_it_is() -> None:
    values = [_value(rank, (5, 8)).t() for rank in range(RANKS)]
    found = _emulated(lambda mesh: all_reduce(_local(values.__getitem__), mesh))
    _assert_equal(found, [_in_order(values)] * RANKS)
    found = _emulated(lambda mesh: all_to_all(_local(values.__getitem__), mesh))
    expected = [
        torch.cat([value[2 * rank : 2 * rank + 2] for value in values]) for rank in range(RANKS)
    ]
    _assert_equal(found, expected)


def test_reduce_scatter_sums_what_is_meant_for_a_rank() -> None:
    values = [_value(rank, (RANKS, 3, 2)) for rank in range(RANKS)]
    found = _emulated(lambda mesh: reduce_scatter(_local(values.__getitem__), mesh))
    _assert_equal(found, list(_in_order(values)))


@pytest.mark.parametrize("order", ["rank", "library"])
def test_reduce_scatter_takes_uneven_sizes(order: Any) -> None:
    values = [_value(rank, (sum(SIZES), 3)) for rank in range(RANKS)]
    found = _emulated(
        lambda mesh: reduce_scatter(_local(values.__getitem__), mesh, sizes=SIZES, order=order)
    )
    _assert_equal(found, _in_order(values).split(list(SIZES)))


def test_all_gather_stacks_in_rank_order() -> None:
    values = [_value(rank, (2, 3)) for rank in range(RANKS)]
    found = _emulated(lambda mesh: all_gather(_local(values.__getitem__), mesh))
    _assert_equal(found, [torch.stack(values)] * RANKS)


@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 0, 7), (2, 2, 2, 1), (0, 0, 0, 0)])
def test_all_gather_concatenates_uneven_sizes(sizes: tuple[int, ...]) -> None:
    values = [_value(rank, (sizes[rank], 3)) for rank in range(RANKS)]
    found = _emulated(lambda mesh: all_gather(_local(values.__getitem__), mesh, sizes=sizes))
    _assert_equal(found, [torch.cat(values)] * RANKS)


def _splits(mesh: DeviceMesh) -> dict[str, Any]:
    del mesh
    return {
        "input_splits": _local(lambda rank: torch.tensor(SPLITS[rank])),
        "output_splits": _local(lambda rank: torch.tensor([row[rank] for row in SPLITS])),
    }


def _sent(values: Sequence[Tensor], rank: int) -> Tensor:
    parts = [value.split(list(SPLITS[peer]))[rank] for peer, value in enumerate(values)]
    return torch.cat(parts)


def test_all_to_all_sends_uneven_splits() -> None:
    values = [_value(rank, (sum(SPLITS[rank]), 2, 3)) for rank in range(RANKS)]
    found = _emulated(lambda mesh: all_to_all(_local(values.__getitem__), mesh, **_splits(mesh)))
    _assert_equal(found, [_sent(values, rank) for rank in range(RANKS)])


def test_a_group_over_one_axis_is_the_ranks_that_differ_in_it() -> None:
    values = [_value(rank) for rank in range(4)]
    found = _emulated(lambda mesh: all_reduce(_local(values.__getitem__), mesh, axes=0), (2, 2))
    even, odd = values[0] + values[2], values[1] + values[3]
    _assert_equal(found, [even, odd, even, odd])


def test_one_rank_alone_gets_a_copy() -> None:
    with emulate(1):
        mesh = init_device_mesh("cpu", (1,))
        heard: list[Communication] = []
        value = RankTensor([torch.ones(2, 3)])
        with listening(heard.append):
            results = [
                all_reduce(value, mesh),
                reduce_scatter(value.unsqueeze(0), mesh),
                all_gather(value, mesh)[0],
                all_to_all(value, mesh),
                all_reduce(value, mesh, order="library"),
                all_reduce(value, mesh, axes=()),
            ]
        for result in results:
            result.add_(1)
        assert not heard
        assert torch.equal(value.of_rank(0), torch.ones(2, 3))
        assert all(torch.equal(r.of_rank(0), torch.ones(2, 3) + 1) for r in results)  # pyright: ignore[reportAttributeAccessIssue]


# Gradients


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


def _plain_gradients(case: str) -> list[tuple[Tensor, ...]]:
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


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_sum_of_all_losses(case: str) -> None:
    with emulate(RANKS):
        found = _gradients(case, init_device_mesh("cpu", (RANKS,)))
        by_rank = [tuple(cast(RankTensor, t).of_rank(r) for t in found) for r in range(RANKS)]
    for mine, expected in zip(by_rank, _plain_gradients(case), strict=True):
        _assert_equal(mine, [value.detach() for value in expected])


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_an_operation_without_gradient_is_refused_where_one_is_needed(op: Any) -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = _local(lambda _: torch.ones(2)).requires_grad_()
        for collective in (all_reduce, reduce_scatter):
            with pytest.raises(ValueError, match=f"op '{op}' is not differentiable"):
                collective(x, mesh, op=op)
            with torch.no_grad():
                collective(x, mesh, op=op)


# Processes


def _bits(mesh: DeviceMesh) -> list[Tensor]:
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


def _bits_in_a_process() -> list[Tensor]:
    return _bits(init_device_mesh("cpu", (RANKS,)))


def test_processes_have_the_bits_of_emulated_ranks(world4: World) -> None:
    with emulate(RANKS):
        expected = cast(list[RankTensor], _bits(init_device_mesh("cpu", (RANKS,))))
        found = world4.run(_bits_in_a_process)
        for rank in range(RANKS):
            _assert_equal(found[rank], [tensor.of_rank(rank) for tensor in expected])


def _bits_of_axes(mesh: DeviceMesh) -> list[Tensor]:
    """Both axes as one group, or one of them, of a mesh whose order is not that of ranks."""
    value = _local(lambda rank: _value(rank, (8, 5)))
    # The library adds up as it likes, so these sums are exact in any order.
    whole = _local(lambda rank: _whole(rank, (5, 3)))
    results: list[Tensor] = []
    for axes in (("rows", "columns"), "rows", 1):
        results += [all_reduce(value, mesh, axes=axes), all_gather(value, mesh, axes=axes)]
        results += [all_to_all(value, mesh, axes=axes)]
    for order in ("rank", "library"):
        results += [all_reduce(whole, mesh, order=order)]
        results += [reduce_scatter(whole[:4], mesh, order=order)]
        results += [reduce_scatter(whole, mesh, sizes=(1, 2, 0, 2), order=order)]
    own = _local(lambda rank: _value(rank, ((1, 2, 0, 2)[_place(mesh, rank)], 3)))
    results += [all_gather(own, mesh, sizes=(1, 2, 0, 2))]
    sends = _local(lambda rank: torch.tensor(SPLITS[_place(mesh, rank)]))
    gets = _local(lambda rank: torch.tensor([row[_place(mesh, rank)] for row in SPLITS]))
    own = _local(lambda rank: _value(rank, (sum(SPLITS[_place(mesh, rank)]), 3)))
    results += [all_to_all(own, mesh, input_splits=sends, output_splits=gets)]
    return [*results, *_bits_of_rows(mesh)]


def _bits_of_rows(mesh: DeviceMesh) -> list[Tensor]:
    """Gather along columns what has other sizes in the other row, and go back."""
    own_sizes = ((3, 1), (0, 2))
    sizes = _local(lambda rank: torch.tensor(own_sizes[_place(mesh, rank) // 2]))
    place = {rank: divmod(_place(mesh, rank), 2) for rank in range(RANKS)}
    own = _local(lambda rank: _value(rank, (own_sizes[place[rank][0]][place[rank][1]], 2)))
    gathered = all_gather(own.requires_grad_(), mesh, axes="columns", sizes=sizes)
    weight = _local(lambda rank: _value(5 + rank, (sum(own_sizes[place[rank][0]]), 2)))
    return [gathered.detach(), *torch.autograd.grad(gathered, own, weight)]


def _place(mesh: DeviceMesh, rank: int) -> int:
    return mesh.mesh.flatten().tolist().index(rank)


def _shuffled() -> DeviceMesh:
    return DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("rows", "columns"))


def _bits_of_axes_in_a_process() -> list[Tensor]:
    return _bits_of_axes(_shuffled())


def test_ranks_are_in_the_order_of_the_mesh(world4: World) -> None:
    with emulate(RANKS):
        expected = cast(list[RankTensor], _bits_of_axes(_shuffled()))
        found = world4.run(_bits_of_axes_in_a_process)
        for rank in range(RANKS):
            _assert_equal(found[rank], [tensor.of_rank(rank) for tensor in expected])


def _check_groups() -> None:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    values = [_value(r, (4, 5)) for r in range(RANKS)]
    assert torch.equal(all_reduce(values[rank], group), _in_order(values))
    assert torch.equal(reduce_scatter(values[rank], group), _in_order(values)[rank])
    assert torch.equal(all_gather(values[rank], group), torch.stack(values))
    assert torch.equal(all_to_all(values[rank], group), torch.stack(values)[:, rank])


def test_a_process_group_serves_as_well_as_a_mesh(world4: World) -> None:
    world4.run(_check_groups)


def test_emulated_ranks_know_the_group_of_all_of_them_only() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        world = dist.group.WORLD
        assert world is not None
        value = _local(lambda rank: torch.tensor(rank))
        assert all_reduce(value, world).of_rank(2).item() == 6  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(NotImplementedError, match="pass a mesh and axes"):
            all_reduce(value, mesh.get_group(0))


# Bytes


def _heard(program: Program, mesh_shape: tuple[int, ...] = (RANKS,)) -> list[Communication]:
    events: list[Communication] = []
    with emulate(math.prod(mesh_shape)), listening(events.append):
        program(init_device_mesh("cpu", mesh_shape))
    return events


def _kinds_and_bytes(events: Sequence[Communication]) -> list[tuple[str, int]]:
    return [(event.kind, event.nbytes) for event in events]


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4), (2, 2, 2)])
def test_a_reduction_sends_what_a_ring_sends_in_one_group(mesh_shape: tuple[int, ...]) -> None:
    numel, itemsize, ranks = 64, 4, 8
    share = (ranks - 1) * numel * itemsize // ranks
    events = _heard(lambda mesh: all_reduce(_ones(numel), mesh), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_to_all", share), ("all_gather", share)]
    assert {(event.axes, event.num_ranks) for event in events} == {
        (tuple(range(len(mesh_shape))), ranks)
    }
    events = _heard(lambda mesh: reduce_scatter(_ones(8, 8), mesh), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_to_all", share)]
    events = _heard(lambda mesh: all_gather(_ones(8), mesh), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_gather", share)]
    events = _heard(lambda mesh: all_to_all(_ones(8, 8), mesh), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_to_all", share)]
    events = _heard(lambda mesh: all_reduce(_ones(numel), mesh, order="library"), mesh_shape)
    assert _kinds_and_bytes(events) == [("all_reduce", 2 * share)]
    events = _heard(lambda mesh: reduce_scatter(_ones(8, 8), mesh, order="library"), mesh_shape)
    assert _kinds_and_bytes(events) == [("reduce_scatter", share)]


def test_a_small_all_reduce_is_one_collective() -> None:
    # A scalar is sent whole to the other 3; the two steps would send 3 elements each.
    events = _heard(lambda mesh: all_reduce(_ones(), mesh))
    assert _kinds_and_bytes(events) == [("all_gather", 12)]
    # Between two ranks all is small.
    events = _heard(lambda mesh: all_reduce(_ones(100), mesh), (2,))
    assert _kinds_and_bytes(events) == [("all_gather", 400)]


def test_uneven_parts_are_padded_only_if_they_are_nearly_even() -> None:
    def sent(*sizes: int) -> list[tuple[str, int]]:
        def program(mesh: DeviceMesh) -> Tensor:
            own = _local(lambda rank: torch.ones(sizes[rank], 2))
            return all_gather(own, mesh, sizes=sizes)

        return _kinds_and_bytes(_heard(program))

    assert sent(2, 2, 2, 1) == [("all_gather", 3 * 2 * 8)]
    assert sent(10, 0, 0, 0) == [("all_to_all", 3 * 10 * 8)]
    assert sent(0, 0, 0, 10) == [("all_to_all", 0)]


def _bytes_of_all() -> list[tuple[str, int]]:
    events: list[Communication] = []
    mesh = init_device_mesh("cpu", (RANKS,))
    with listening(events.append):
        _bits(mesh)
    return _kinds_and_bytes(events)


@pytest.mark.slow
def test_processes_send_what_emulated_ranks_send(world4: World) -> None:
    found = world4.run(_bytes_of_all)
    for rank in (0, 2):
        with emulate(RANKS, rank=rank):
            assert found[rank] == _bytes_of_all()


# Errors

WRONG: list[tuple[Program, str]] = [
    (lambda mesh: all_reduce(_ones(2), mesh, op=cast(Any, "mean")), "expected op to be one of"),
    (lambda mesh: all_reduce(_ones(2), mesh, order=cast(Any, "ring")), "'rank' or 'library'"),
    (lambda mesh: all_reduce(_ones(2).long(), mesh, op="avg"), "needs a dtype with fractions"),
    (lambda mesh: all_reduce(_ones(2) * 1j, mesh, op="max"), "needs a dtype with an order"),
    (
        lambda mesh: all_reduce(_ones(2), mesh, accumulate=torch.bfloat16),
        r"hold every torch.float32, got torch.bfloat16",
    ),
    (
        lambda mesh: all_reduce(_ones(2), mesh, order="library", accumulate=torch.float64),
        "no accumulate with order 'library'",
    ),
    (lambda mesh: all_reduce(_ones(2), mesh, axes=1), r"expected axes of .*, got \[1\]"),
    (lambda mesh: all_reduce(_ones(2), mesh, axes="tp"), r"got \['tp'\]"),
    (lambda mesh: all_reduce(_ones(2), mesh, axes=(0, 0)), "each once"),
    (lambda mesh: all_reduce(_different(), mesh), "one shape on all ranks"),
    (lambda mesh: all_gather(_different(), mesh), "one shape on all ranks"),
    (lambda mesh: all_gather(_ones(2), mesh, sizes=(2, 3)), "of 4 ranks, got"),
    (lambda mesh: all_gather(_ones(2), mesh, sizes=(2, 2, 2, -1)), "at least 0"),
    (lambda mesh: all_gather(_ones(2), mesh, sizes=(2, 2, 2, 1)), r"to be 1 .*got shape \(2,\)"),
    (lambda mesh: reduce_scatter(_ones(3), mesh), r"dim 0 to be 4 \(one row per rank"),
    (lambda mesh: reduce_scatter(_ones(), mesh), r"got shape \(\)"),
    (lambda mesh: reduce_scatter(_ones(4), mesh, sizes=(1, 1, 1, 2)), "dim 0 to be 5"),
    (lambda mesh: all_to_all(_ones(6), mesh), "multiple of 4"),
    (lambda mesh: all_to_all(_ones(), mesh), "multiple of 4"),
    (lambda mesh: all_to_all(_ones(4), mesh, input_splits=(1, 1, 1, 1)), "or neither"),
    (
        lambda mesh: all_to_all(_ones(4), mesh, input_splits=(1,) * 4, output_splits=(1, 1, 2, 0)),
        r"output_splits \(1, 1, 1, 1\) on rank 0",
    ),
    (
        lambda mesh: all_to_all(_ones(5), mesh, input_splits=(1,) * 4, output_splits=(1,) * 4),
        "dim 0 to be 4",
    ),
]


@pytest.mark.parametrize(("program", "message"), WRONG)
def test_arguments_that_do_not_fit_are_refused_before_any_communication(
    program: Program, message: str
) -> None:
    heard: list[Communication] = []
    with emulate(RANKS), listening(heard.append), pytest.raises(ValueError, match=message):
        program(init_device_mesh("cpu", (RANKS,)))
    assert not heard


def test_a_group_takes_no_axes_and_must_be_one() -> None:
    with emulate(2):
        assert dist.group.WORLD is not None
        with pytest.raises(ValueError, match="axes are those of a mesh"):
            all_reduce(_ones(2), dist.group.WORLD, axes=0)
        with pytest.raises(TypeError, match="a group that this rank is in"):
            all_reduce(_ones(2), cast(Any, None))
