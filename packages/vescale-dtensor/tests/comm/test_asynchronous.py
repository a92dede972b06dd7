"""Collectives that are started and waited for later: the bits and errors of those that are not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import (
    CollectiveWork,
    CommCounter,
    all_gather,
    all_reduce,
    all_to_all,
    announced_failures,
    emulate,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from vescale_dtensor._comm import failures
from vescale_dtensor._comm.emulation import RankTensor
from vescale_testing import World

from .collective_programs import RANKS, _local, _value
from .test_failures import _fail, _group
from .test_profiling import ranges_of


def _rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return _local(lambda rank: _value(rank, (RANKS, 5), dtype))


def _started(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return what four collectives give that are under way at the same time."""
    rows, total = _rows(dtype), _rows(dtype)
    outs = [rows.new_empty(RANKS, *rows.shape), torch.empty_like(rows), torch.empty_like(rows[0])]
    works = [
        start_all_gather(rows, mesh, out=outs[0]),
        start_all_to_all(rows, mesh, out=outs[1]),
        start_reduce_scatter(rows, mesh, out=outs[2]),
        start_all_reduce(total, mesh),
    ]
    # Whoever waits need not do it in the order in which they were started.
    found = [work.wait() for work in reversed(works)][::-1]
    assert all(got is out for got, out in zip(found, [*outs, total], strict=True))
    return found


def _synchronous(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rows = _rows(dtype)
    return [
        all_gather(rows, mesh),
        all_to_all(rows, mesh),
        reduce_scatter(rows, mesh, order="library"),
        all_reduce(rows, mesh, order="library"),
    ]


def _both() -> list[tuple[bool, bool]]:
    mesh, found = init_device_mesh("cpu", (RANKS,)), list[tuple[bool, bool]]()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        got, expected = _started(mesh, dtype), _synchronous(mesh, dtype)
        found.append((all(map(torch.equal, got, expected)), got[0].dtype == dtype))
    return found


def test_the_bits_are_those_of_collectives_that_are_not_asynchronous(world4: World) -> None:
    for found in world4.run(_both):
        assert found == [(True, True)] * 4


def test_emulated_ranks_have_the_result_at_once() -> None:
    with emulate(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        got, expected = _started(mesh), _synchronous(mesh)
        for one, other in zip(got, expected, strict=True):
            assert isinstance(one, RankTensor)
            assert isinstance(other, RankTensor)
            assert all(map(torch.equal, one.parts, other.parts))


def test_a_rank_that_is_alone_has_what_it_gave() -> None:
    with emulate(1):
        mesh, rows = init_device_mesh("cpu", (1,)), torch.arange(3.0).view(1, 3)
        gathered = start_all_gather(rows, mesh, out=torch.empty(1, 1, 3)).wait()
        assert torch.equal(gathered[0], rows)
        assert torch.equal(start_all_to_all(rows, mesh, out=torch.empty(1, 3)).wait(), rows)
        assert torch.equal(start_reduce_scatter(rows, mesh, out=torch.empty(3)).wait(), rows[0])
        assert torch.equal(start_all_reduce(rows.clone(), mesh).wait(), rows)


def _seen() -> tuple[list[tuple[str, int]], list[tuple[str, int]], list[str], set[str]]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    with torch.profiler.profile() as profile, CommCounter() as counter:
        _started(mesh)
    with CommCounter() as expected:
        _synchronous(mesh)
    keys = [e.name for e in profile.events() or () if e.name.startswith("vescale: all_gather")]
    got, sent = ([(e.kind, e.nbytes) for e in each.events] for each in (counter, expected))
    return got, sent, keys, ranges_of(profile)


def test_counters_and_profiles_see_each_once(world4: World) -> None:
    for got, expected, gathers, ranges in world4.run(_seen):
        assert got == expected
        assert gathers == ["vescale: all_gather over dp"]
        assert {"vescale: wait for all_gather over dp", "vescale: all_to_all over dp"} <= ranges


def _waits_for_one_that_raised(failing: int) -> tuple[str, str]:
    """Return what this rank says when it waits twice for what one rank never starts."""
    group, rows = _group(), torch.ones(2, 2)
    work: CollectiveWork | None = None
    if dist.get_rank() != failing:
        work = start_all_to_all(rows, group, out=torch.empty(2, 2))
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as again:
            work.wait()  # pyright: ignore[reportOptionalMemberAccess]: what raised
        return f"{type(error).__name__}: {error}", str(again.value)
    return "", ""


def _raises(failing: int) -> tuple[str, str]:
    if dist.get_rank() == failing:
        with contextlib.suppress(KeyError), announced_failures():
            raise KeyError("lost the data")
    return _waits_for_one_that_raised(failing)


@pytest.mark.slow
def test_whoever_waits_names_the_rank_that_failed(world2: World) -> None:
    (waiting, again), _ = world2.run(_raises, 1)
    assert waiting.startswith("PeerError: rank 1 raised KeyError: 'lost the data'")
    assert again  # not the memory that nothing arrived in


def _standing_after_a_start() -> tuple[int, int]:
    group = _group(60)  # the other rank is busy with waiting for the failure
    _fail(1, ValueError("the first"))
    before = len(failures._standing)
    work = start_all_reduce(torch.ones(3), group)
    after_start = len(failures._standing)
    work.wait()
    assert not failures._standing
    return before, after_start


@pytest.mark.slow
def test_a_failure_is_over_once_a_collective_is_complete_and_not_when_it_starts(
    world2: World,
) -> None:
    _, (before, after_start) = world2.run(_standing_after_a_start)
    assert before == after_start > 0


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (lambda x, mesh: start_all_gather(x, mesh, out=torch.empty(2)), "expected out"),
        (lambda x, mesh: start_all_gather(x.T, mesh, out=torch.empty(2, 2, 3)), "contiguous"),
        (lambda x, mesh: start_all_to_all(x, mesh, out=torch.empty(3, 2)), "multiple of 2"),
        (lambda x, mesh: start_reduce_scatter(x, mesh, out=torch.empty(2)), "one row per rank"),
        (lambda x, mesh: start_all_reduce(x.requires_grad_(), mesh), "has no gradients"),
    ],
)
def test_what_does_not_fit_is_refused(start: Any, text: str) -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match=text):
            start(torch.ones(3, 2), mesh)


def _large_gather(dtype: torch.dtype) -> tuple[bool, list[str]]:
    mesh = init_device_mesh("cpu", (RANKS,))
    part = _value(dist.get_rank(), (40_000,), dtype)
    apart, within = part.new_empty(RANKS, *part.shape), part.new_empty(RANKS, *part.shape)
    own = within[dist.get_rank()].copy_(part)
    with torch.profiler.profile() as profile:
        start_all_gather(part, mesh, out=apart).wait()
        start_all_gather(own, mesh, out=within).wait()
    wanted = torch.stack([_value(rank, (40_000,), dtype) for rank in range(RANKS)])
    right = torch.equal(apart, wanted) and torch.equal(within, wanted)
    return right, [
        event.name for event in profile.events() or () if event.name.startswith("gloo:")
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_gloo_gathers_large_tensors_where_they_are_wanted(
    world4: World, dtype: torch.dtype
) -> None:
    for right, called in world4.run(_large_gather, dtype):
        assert right
        assert {*called} == {"gloo:broadcast"}  # its all_gather has memory of its own


_FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _sums_of_two(dtype: torch.dtype) -> tuple[bool, bool]:
    """Return whether the backend sums numbers of all magnitudes as rank order does; -0 apart."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(dist.get_rank())
    bits = torch.randint(0, 256, (2**16 * dtype.itemsize,), generator=generator)
    part = bits.to(torch.uint8).view(dtype)
    part = torch.where(part.isnan(), part.new_full((), -0.0), part)
    total, as_bits = part.clone(), {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    start_all_reduce(total, mesh).wait()
    ordered = all_reduce(part, mesh)
    finite = ~ordered.isnan()  # inf - inf has no sign
    same = torch.equal(total.isnan(), ordered.isnan())
    return same, torch.equal(total.view(as_bits)[finite], ordered.view(as_bits)[finite])


@pytest.mark.parametrize("dtype", _FLOATS)
def test_a_backend_has_one_sum_of_two_ranks(world2: World, dtype: torch.dtype) -> None:
    assert world2.run(_sums_of_two, dtype) == [(True, True)] * 2
