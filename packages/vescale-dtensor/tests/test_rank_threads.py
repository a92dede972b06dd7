"""Ranks that are threads do what processes do, to the bit, and can be looked at."""

from __future__ import annotations

import gc
import os
import pdb  # noqa: T100 what is tested
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from vescale_dtensor import CommCounter, DeadlockError, all_reduce, distribute_tensor, run_ranks
from vescale_testing import World


def _join() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def _values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(numel, generator=generator).to(dtype)


def _single(name: str, former: str) -> Callable[..., Any]:
    """Return a function of torch under the name that it has since 2.13, or had before."""
    return getattr(dist, name, None) or getattr(dist, former)


def reductions(numels: list[int]) -> list[Tensor]:
    """Return what gloo makes of sums whose order matters."""
    _join()
    found: list[Tensor] = []
    for numel in numels:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            summed = _values(numel, dtype)
            dist.all_reduce(summed)
            found.append(summed)
    product = _values(numels[0])
    dist.all_reduce(product, dist.ReduceOp.PRODUCT)
    onto_one = _values(numels[-1])
    dist.reduce(onto_one, 1)
    part = torch.empty(40)
    _single("reduce_scatter_single", "reduce_scatter_tensor")(
        part, _values(40 * dist.get_world_size())
    )
    own = [onto_one] if dist.get_rank() == 1 else []
    return [*found, product, part, *own]


@pytest.mark.slow
def test_sums_of_four_ranks_have_the_bits_of_gloo(world4: World) -> None:
    numels = [1, 7, 33, 100_003, 3_000_001]
    expected = world4.run(reductions, numels)
    for ours, theirs in zip(run_ranks(reductions, 4, args=(numels,)), expected, strict=True):
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(own, other), index


def exchanges() -> list[Any]:
    """Return what every kind of collective gives."""
    rank, size = _join(), dist.get_world_size()
    found: list[Any] = []
    x = torch.arange(4.0) + 10 * rank
    rows = [torch.empty(4) for _ in range(size)]
    dist.all_gather(rows, x)
    found.append(torch.stack(rows))
    flat = torch.empty(4 * size)
    _single("all_gather_single", "all_gather_into_tensor")(flat, x)
    found.append(flat)
    sent = [place + 1 for place in range(size)]
    came = torch.empty((rank + 1) * size)
    dist.all_to_all_single(
        came, torch.arange(float(sum(sent))) + 100 * rank, [rank + 1] * size, sent
    )
    found.append(came)
    broadcast = x.clone()
    dist.broadcast(broadcast, 1)
    found.append(broadcast)
    group = dist.new_group([1, 0])
    work = dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    work.wait()
    found.append(x)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found.append(objects)
    into = torch.empty(3)
    ops = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, into, (rank - 1) % size),
    ]
    for each in dist.batch_isend_irecv(ops):
        each.wait()
    found.append(into)
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.ones(1) * rank, gathered)
    part = torch.empty(1)
    dist.scatter(part, gathered)
    found.append(part)
    dist.barrier()
    return [each.tolist() if isinstance(each, Tensor) else each for each in found]


def test_collectives_and_messages_give_what_processes_get(world2: World) -> None:
    assert run_ranks(exchanges, 2) == world2.run(exchanges)


def whole(x: Any) -> Tensor:
    return x.full_tensor()


def of_distributed_tensors() -> tuple[Tensor, str]:
    """Return a sum of DTensors over a mesh with two axes, and how often this rank communicated."""
    _join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, (Shard(0), Shard(1)))
    with CommCounter() as counter:
        y = whole((x @ x.T).sum(0)) + all_reduce(torch.ones(4, 1), mesh).sum()
    return y, str(counter)


@pytest.mark.slow
def test_distributed_tensors_are_those_of_processes(world4: World) -> None:
    ours, theirs = run_ranks(of_distributed_tensors, 4), world4.run(of_distributed_tensors)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own[0], other[0])
        assert own[1] == other[1]


def test_every_rank_draws_by_itself() -> None:
    def draw() -> list[Any]:
        rank = _join()
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        dist.barrier()
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    before = torch.get_rng_state(), random.getstate()
    drawn = run_ranks(draw, 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    for rank, numbers in enumerate(drawn):
        torch_generator = torch.Generator().manual_seed(rank)
        assert numbers == [
            torch.rand((), generator=torch_generator).item(),
            random.Random(rank).random(),
            np.random.RandomState(rank).rand(),
        ]


def test_every_rank_has_settings_of_its_own() -> None:
    def settings() -> tuple[Any, ...]:
        rank = _join()
        if rank == 1:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
        dist.barrier()
        is_on = torch.are_deterministic_algorithms_enabled()
        return torch.get_default_dtype(), is_on, os.environ["RANK"], os.environ["LOCAL_RANK"]

    assert run_ranks(settings, 2) == [
        (torch.float32, False, "0", "0"),
        (torch.float64, True, "1", "1"),
    ]
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert "LOCAL_WORLD_SIZE" not in os.environ


def test_prints_come_in_the_order_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        rank = _join()
        print("before", rank)
        dist.barrier()
        print("after")

    run_ranks(talk, 2)
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "[rank 0] before 0", "[rank 1] before 1", "[rank 1] after", "[rank 0] after",
    ]  # fmt: skip
    run_ranks(talk, 2, rank=1)
    assert capsys.readouterr().out == "before 1\nafter\n"


def test_a_debugger_stops_the_whole_world(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> float:
        rank = _join()
        x = torch.full((2,), float(rank + 1))
        dist.all_reduce(x)
        breakpoint()  # noqa: T100 what is tested
        dist.all_reduce(x)
        return x.sum().item()

    def stop() -> None:  # not pytest's, which has the terminal to itself
        pdb.Pdb(nosigint=True).set_trace(sys._getframe().f_back)

    monkeypatch.setattr(sys, "breakpointhook", stop)
    monkeypatch.setattr(sys, "stdin", StringIO("p rank, x.tolist()\nx.zero_()\ncontinue\n"))
    # The other rank passes over its breakpoint, and receives what was written in this one.
    assert run_ranks(work, 2, rank=1) == [6.0, 6.0]
    assert "(1, [3.0, 3.0])" in capsys.readouterr().out


def test_a_deadlock_says_where_each_rank_waits() -> None:
    def meet_in_vain() -> None:
        if _join() == 0:
            dist.recv(torch.empty(3), 1)
        elif dist.get_rank() == 1:
            dist.barrier()

    with pytest.raises(DeadlockError) as raised:
        run_ranks(meet_in_vain, 3)
    text = str(raised.value)
    assert "rank 0 waits for receive of float32[3] from 1" in text
    assert "rank 1 waits for barrier over all ranks" in text
    assert f"{__file__}:" in text
    assert "rank 2 has ended" in text


def test_different_collectives_are_refused_with_both_names() -> None:
    def disagree() -> None:
        dist.all_reduce(torch.ones(2 + _join()))

    with pytest.raises(RuntimeError, match=r"all_reduce float32\[2\].* and all_reduce float32\[3"):
        run_ranks(disagree, 2)


def test_what_one_rank_raises_ends_all_and_is_raised() -> None:
    ended: list[int] = []

    def fail() -> None:
        rank = _join()
        try:
            if rank == 1:
                raise KeyError("here")
            dist.barrier()
        finally:
            ended.append(rank)

    with pytest.raises(KeyError, match="here") as raised:
        run_ranks(fail, 3)
    assert raised.value.__notes__ == ["raised on emulated rank 1 of 3"]
    assert raised.traceback[-1].name == "fail"
    assert sorted(ended) == [0, 1]  # the last one had not begun


def sum_within_jvp() -> Tensor:
    _join()

    def function(x: Tensor) -> Tensor:
        dist.barrier()
        return x.square()

    ones = torch.ones(2)
    return torch.func.jvp(function, (ones,), (ones,))[1]


def test_ranks_that_would_take_turns_within_a_forward_derivative_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="waits for barrier over all ranks within a jvp"):
        run_ranks(sum_within_jvp, 2)


def test_a_wait_with_a_timeout_ends_when_no_rank_can_go_on() -> None:
    def wait_in_vain() -> str:
        if _join() == 1:
            return ""
        work = dist.irecv(torch.empty(1), 1)
        assert work is not None
        try:
            work.wait(timedelta(seconds=3600))
        except RuntimeError as error:
            return str(error)
        return "came"

    assert "timed out" in run_ranks(wait_in_vain, 2)[0]


def test_nothing_is_left_behind() -> None:
    made: list[weakref.ref[Any]] = []

    def work() -> None:
        _join()
        model = torch.nn.Linear(4, 4)
        made.append(weakref.ref(model.weight))
        group = dist.new_group([0, 1])
        made.append(weakref.ref(group))
        dist.all_reduce(model.weight.data, group=group)

    threads, variables, out = threading.active_count(), dict(os.environ), sys.stdout
    for _ in range(3):
        run_ranks(work, 2)
    gc.collect()
    assert not dist.is_initialized()
    assert threading.active_count() == threads
    assert dict(os.environ) == variables
    assert sys.stdout is out
    assert [each() for each in made] == [None] * 12


def test_a_thread_that_a_rank_starts_cannot_communicate() -> None:
    def work() -> list[str]:
        _join()
        said: list[str] = []

        def beside() -> None:
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as error:
                said.append(str(error))

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        return said

    assert "on a thread that a rank started" in run_ranks(work, 2)[0][0]


@pytest.mark.parametrize(("size", "rank"), [(0, None), (2, 2)])
def test_sizes_that_make_no_sense_are_refused(size: int, rank: int | None) -> None:
    with pytest.raises(ValueError, match="expected a"):
        run_ranks(_join, size, rank=rank)


def test_every_rank_filters_warnings_by_itself() -> None:
    def count() -> int:
        if _join() == 1:
            warnings.simplefilter("ignore")
        with warnings.catch_warnings():
            dist.barrier()
            warnings.simplefilter("error")
            dist.barrier()
        return sum(each[0] == "error" and not each[1] for each in warnings.filters)

    before = list(warnings.filters)
    found = run_ranks(count, 2)
    assert warnings.filters == before
    assert found[0] == sum(each[0] == "error" and not each[1] for each in before)


def test_polling_lets_the_other_ranks_run() -> None:
    def poll() -> float:
        x = torch.ones(1)
        if _join() == 1:
            dist.barrier()
            dist.send(x, 0)
            return 0.0
        dist.barrier()
        work = dist.irecv(x, 1)
        assert work is not None
        while not work.is_completed():
            pass
        return x.item()

    assert run_ranks(poll, 2) == [1.0, 0.0]


def test_the_store_is_whole_behind_a_prefix() -> None:
    def use() -> tuple[bool, bool, int]:
        _join()
        store = distributed_c10d.PrefixStore("mine", distributed_c10d._get_default_store())
        before = store.num_keys()
        store.set(str(dist.get_rank()), "here")
        found = store.delete_key(str(dist.get_rank())), store.delete_key("elsewhere")
        return *found, store.num_keys() - before

    assert run_ranks(use, 2) == [(True, False, 0)] * 2
