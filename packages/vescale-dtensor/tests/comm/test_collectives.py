"""Collectives against sums written out on one device, emulated and between processes.

A program is run on emulated ranks, where it is compared with plain torch, and by four
processes, where it has to have the same bits.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import all_gather, all_reduce, all_to_all, emulate, reduce_scatter
from vescale_dtensor._comm.emulation import RankTensor
from vescale_dtensor._comm.events import Communication, listening
from vescale_testing import World

from .collective_programs import (
    CASES,
    RANKS,
    SIZES,
    SPLITS,
    _gradients,
    _in_order,
    _local,
    _sent,
    _splits,
    _value,
    _whole,
    all_bits,
    assert_equal,
    emulated,
    plain_gradients,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(37,), (), (0, 3), (3, 1), (8, 5)])
def test_all_reduce_adds_in_rank_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = [_value(rank, shape, dtype) for rank in range(RANKS)]
    found = emulated(lambda mesh: all_reduce(_local(values.__getitem__), mesh))
    assert_equal(found, [_in_order(values)] * RANKS)


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
        found = emulated(
            lambda mesh, op=op: all_reduce(
                _local(values.__getitem__), mesh, op=cast(Any, op), order=order
            )
        )
        assert_equal(found, [value] * RANKS)


def test_sums_are_added_up_in_the_dtype_asked_for() -> None:
    values = [torch.tensor([x]) for x in (1.0, 1e8, -1e8, 0.0)]
    asked = emulated(
        lambda mesh: all_reduce(_local(values.__getitem__), mesh, accumulate=torch.float64)
    )
    assert asked[0].item() == 1.0
    assert emulated(lambda mesh: all_reduce(_local(values.__getitem__), mesh))[0].item() == 0.0


def test_a_tensor_that_is_not_contiguous_is_read_as_it_is() -> None:
    values = [_value(rank, (5, 8)).t() for rank in range(RANKS)]
    found = emulated(lambda mesh: all_reduce(_local(values.__getitem__), mesh))
    assert_equal(found, [_in_order(values)] * RANKS)
    found = emulated(lambda mesh: all_to_all(_local(values.__getitem__), mesh))
    expected = [
        torch.cat([value[2 * rank : 2 * rank + 2] for value in values]) for rank in range(RANKS)
    ]
    assert_equal(found, expected)


def test_reduce_scatter_sums_what_is_meant_for_a_rank() -> None:
    values = [_value(rank, (RANKS, 3, 2)) for rank in range(RANKS)]
    found = emulated(lambda mesh: reduce_scatter(_local(values.__getitem__), mesh))
    assert_equal(found, list(_in_order(values)))


@pytest.mark.parametrize("order", ["rank", "library"])
def test_reduce_scatter_takes_uneven_sizes(order: Any) -> None:
    values = [_value(rank, (sum(SIZES), 3)) for rank in range(RANKS)]
    found = emulated(
        lambda mesh: reduce_scatter(_local(values.__getitem__), mesh, sizes=SIZES, order=order)
    )
    assert_equal(found, _in_order(values).split(list(SIZES)))


def test_all_gather_stacks_in_rank_order() -> None:
    values = [_value(rank, (2, 3)) for rank in range(RANKS)]
    found = emulated(lambda mesh: all_gather(_local(values.__getitem__), mesh))
    assert_equal(found, [torch.stack(values)] * RANKS)


@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 0, 7), (2, 2, 2, 1), (0, 0, 0, 0)])
def test_all_gather_concatenates_uneven_sizes(sizes: tuple[int, ...]) -> None:
    values = [_value(rank, (sizes[rank], 3)) for rank in range(RANKS)]
    found = emulated(lambda mesh: all_gather(_local(values.__getitem__), mesh, sizes=sizes))
    assert_equal(found, [torch.cat(values)] * RANKS)


def test_all_to_all_sends_uneven_splits() -> None:
    values = [_value(rank, (sum(SPLITS[rank]), 2, 3)) for rank in range(RANKS)]
    found = emulated(lambda mesh: all_to_all(_local(values.__getitem__), mesh, **_splits(mesh)))
    assert_equal(found, [_sent(values, rank) for rank in range(RANKS)])


def test_a_group_over_one_axis_is_the_ranks_that_differ_in_it() -> None:
    values = [_value(rank) for rank in range(4)]
    found = emulated(lambda mesh: all_reduce(_local(values.__getitem__), mesh, axes=0), (2, 2))
    even, odd = values[0] + values[2], values[1] + values[3]
    assert_equal(found, [even, odd, even, odd])


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


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_sum_of_all_losses(case: str) -> None:
    with emulate(RANKS):
        found = _gradients(case, init_device_mesh("cpu", (RANKS,)))
        by_rank = [tuple(cast(RankTensor, t).of_rank(r) for t in found) for r in range(RANKS)]
    for mine, expected in zip(by_rank, plain_gradients(case), strict=True):
        assert_equal(mine, [value.detach() for value in expected])


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


def _bits_in_a_process() -> list[Tensor]:
    return all_bits(init_device_mesh("cpu", (RANKS,)))


def test_processes_have_the_bits_of_emulated_ranks(world4: World) -> None:
    with emulate(RANKS):
        expected = cast(list[RankTensor], all_bits(init_device_mesh("cpu", (RANKS,))))
        found = world4.run(_bits_in_a_process)
        for rank in range(RANKS):
            assert_equal(found[rank], [tensor.of_rank(rank) for tensor in expected])


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
            assert_equal(found[rank], [tensor.of_rank(rank) for tensor in expected])


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
