"""The pool of ranks itself; every function called ``on_rank_*`` runs in a rank process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale_testing import RankError, World
from vescale_testing._rank import COLLECTIVE_TIMEOUT


def on_rank_all_reduce(scale: int) -> int:
    total = torch.tensor(dist.get_rank() * scale)
    dist.all_reduce(total)
    return int(total)


def on_rank_settings() -> tuple[object, ...]:
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return (
        tuple(os.environ.get(key) for key in keys),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.initial_seed(),
        torch.rand(()).item(),
    )


def on_rank_upset_settings() -> None:
    os.environ["RANK"] = "17"
    del os.environ["WORLD_SIZE"]
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)


def on_rank_process_id() -> int:
    return os.getpid()


def on_rank_raise(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("missing")


def on_rank_raise_before_a_collective() -> None:
    on_rank_raise(1)
    dist.barrier()


def on_rank_raise_something_unpicklable() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("defined in a function")


def on_rank_return_something_unpicklable() -> object:
    return lambda: None


def on_rank_crash() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def on_rank_die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def on_rank_exit() -> None:
    raise SystemExit(3)


def on_rank_hang() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def on_rank_warn() -> None:
    warnings.warn("a warning on a rank", UserWarning, stacklevel=1)


def on_rank_assert(expected: int) -> None:
    found = 2
    assert found == expected


def on_rank_modify(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(dist.get_rank())


def on_rank_open_many_groups() -> None:
    for _ in range(60):
        dist.new_group([0, 1])


def process_ids(world: World) -> list[int]:
    return world.run(on_rank_process_id)


def test_every_rank_runs_once_and_results_come_in_rank_order(world4: World) -> None:
    assert len(set(process_ids(world4))) == 4
    assert world4.run(on_rank_all_reduce, 10) == [60, 60, 60, 60]


def test_a_world_of_one_has_a_process_group(world1: World) -> None:
    assert world1.run(on_rank_all_reduce, 10) == [0]


def test_ranks_see_the_environment_of_torchrun(world2: World) -> None:
    environments = [settings[0] for settings in world2.run(on_rank_settings)]
    assert environments == [("0", "0", "2", "2"), ("1", "1", "2", "2")]


def test_each_job_starts_from_the_same_settings(world2: World) -> None:
    before = world2.run(on_rank_settings)
    world2.run(on_rank_upset_settings)
    assert world2.run(on_rank_settings) == before
    assert before[0][1:5] == (1, torch.float32, True, 0)


def test_ranks_stay_up_between_jobs(world2: World) -> None:
    assert process_ids(world2) == process_ids(world2)


def test_each_rank_gets_its_own_copy_of_a_tensor(world2: World) -> None:
    tensor = torch.zeros(1)
    results = world2.run(on_rank_modify, tensor)
    assert [result.item() for result in results] == [0.0, 1.0]
    assert tensor.item() == 0.0


def test_an_error_names_the_rank_and_carries_its_exception_and_traceback(world2: World) -> None:
    with pytest.raises(RankError, match=r"rank 1: Traceback(.|\n)*KeyError: 'missing'") as caught:
        world2.run(on_rank_raise, 1)
    assert set(caught.value.errors) == {1}
    assert "in on_rank_raise" in caught.value.errors[1]
    assert isinstance(caught.value.exceptions[1], KeyError)


def test_the_same_error_on_all_ranks_is_told_once(world2: World) -> None:
    with pytest.raises(RankError, match=r"^ranks 0, 1: ") as caught:
        world2.run(on_rank_assert, 3)
    assert str(caught.value).count("Traceback") == 1


def test_an_assert_on_a_rank_shows_its_values(world2: World) -> None:
    with pytest.raises(RankError, match="assert 2 == 3"):
        world2.run(on_rank_assert, 3)


@pytest.mark.slow
def test_a_rank_that_waits_for_a_failed_one_is_stopped_and_says_where_it_was(
    world2: World,
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="KeyError") as caught:
        world2.run(on_rank_raise_before_a_collective)
    assert time.monotonic() - start < COLLECTIVE_TIMEOUT.total_seconds()
    assert "after rank 1 failed" in caught.value.errors[0]
    assert "in barrier" in caught.value.errors[0]
    assert set(caught.value.exceptions) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fail", [on_rank_raise_before_a_collective, on_rank_die, on_rank_exit, on_rank_warn]
)
def test_a_failure_does_not_poison_the_next_job(world2: World, fail: Callable[[], None]) -> None:
    before = process_ids(world2)
    with pytest.raises(RankError):
        world2.run(fail)
    assert not set(process_ids(world2)) & set(before)
    assert world2.run(on_rank_all_reduce, 1) == [1, 1]


def test_a_rank_that_dies_is_reported_at_once(world2: World) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: died with exit code -9"):
        world2.run(on_rank_die)
    assert time.monotonic() - start < COLLECTIVE_TIMEOUT.total_seconds()


@pytest.mark.slow
def test_a_rank_that_crashes_says_where_it_was(world2: World) -> None:
    with pytest.raises(RankError, match=r"rank 1: died with exit code -11(.|\n)*in on_rank_crash"):
        world2.run(on_rank_crash)


@pytest.mark.slow
def test_a_rank_that_hangs_is_stopped_after_the_timeout_and_says_where_it_was(
    world2: World,
) -> None:
    with pytest.raises(RankError, match=r"no answer after 0.5 s(.|\n)*in on_rank_hang") as caught:
        world2.run(on_rank_hang, timeout=0.5)
    assert set(caught.value.errors) == {0}
    assert not caught.value.exceptions


def test_an_exception_that_cannot_be_pickled_still_has_its_traceback(world1: World) -> None:
    with pytest.raises(RankError, match="LocalError: defined in a function") as caught:
        world1.run(on_rank_raise_something_unpicklable)
    assert not caught.value.exceptions


def test_a_result_that_cannot_be_pickled_is_an_error(world1: World) -> None:
    with pytest.raises(RankError, match="pickle"):
        world1.run(on_rank_return_something_unpicklable)


def test_a_function_without_a_name_is_refused_before_any_rank_sees_it(world1: World) -> None:
    before = process_ids(world1)
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"pickle|local object"):
        world1.run(lambda: None)
    assert process_ids(world1) == before


def test_a_warning_on_a_rank_is_an_error(world1: World) -> None:
    with pytest.raises(RankError, match="UserWarning: a warning on a rank"):
        world1.run(on_rank_warn)


@pytest.mark.slow
def test_ranks_are_replaced_before_their_process_groups_exhaust_open_files(world2: World) -> None:
    before = process_ids(world2)
    for _ in range(20):
        world2.run(on_rank_open_many_groups)
    assert not set(process_ids(world2)) & set(before)


def test_a_closed_world_starts_again() -> None:
    world = World(1)
    before = process_ids(world)
    world.close()
    assert process_ids(world) != before
    world.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_does_not_free_process_groups_of_earlier_tests(tmp_path: Path) -> None:
    """It would wait for threads that it does not have."""
    garbage: list[object] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    gc.disable()
    try:
        garbage.extend((dist.group.WORLD, garbage))
        dist.destroy_process_group()
        del garbage
        worker = multiprocessing.get_context("fork").Process(target=gc.collect)
        worker.start()
    finally:
        gc.enable()
    worker.join(20)
    ended = worker.exitcode
    worker.kill()
    assert ended == 0
