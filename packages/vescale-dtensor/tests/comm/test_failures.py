"""A rank that fails is named by those that waited for it."""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_dtensor import PeerError, all_reduce, announced_failures, named_failures
from vescale_dtensor._comm.positions import Collective
from vescale_dtensor._torch_private import default_store
from vescale_testing import RankError, World


def _group(seconds: float = 3) -> dist.ProcessGroup:
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _second_rank_fails() -> None:
    group = _group()
    with announced_failures():
        if dist.get_rank() == 1:
            raise KeyError("lost the data")
        all_reduce(torch.ones(3), group)


def test_a_waiting_rank_names_the_rank_that_failed(world2: World) -> None:
    with pytest.raises(RankError) as caught:
        world2.run(_second_rank_fails)
    assert "PeerError: rank 1 raised KeyError: 'lost the data'" in caught.value.errors[0]
    assert "KeyError: 'lost the data'" in caught.value.errors[1]


def _fail(failing: int, problem: Exception) -> str:
    """Return what this rank catches when one rank raises and the others wait for it."""
    group = _group()
    try:
        with announced_failures():
            if dist.get_rank() == failing:
                raise problem
            all_reduce(torch.ones(3), group)
    except (PeerError, type(problem)) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def _fail_and_go_on(works_in_between: bool) -> list[str]:
    first = _fail(1, ValueError("the first"))
    if works_in_between:
        all_reduce(torch.ones(3), _group())
    return [first, _fail(2, ValueError("the second"))]


@pytest.mark.slow
@pytest.mark.parametrize("works_in_between", [True, False])
def test_a_rank_that_failed_and_went_on_is_not_blamed_for_a_later_failure(
    world4: World, works_in_between: bool
) -> None:
    outcomes = world4.run(_fail_and_go_on, works_in_between)
    for rank, (first, second) in enumerate(outcomes):
        assert first.startswith(
            "the first" if rank == 1 else "rank 1 raised ValueError: the first"
        )
        text = "the second" if rank == 2 else "rank 2 raised ValueError: the second"
        assert second.startswith(text)


def _is_waited_for_in_silence() -> str:
    _fail(1, ValueError("long ago"))
    group = _group()
    all_reduce(torch.ones(3), group)
    if dist.get_rank() == 1:
        return ""  # as one that was killed: it says nothing, and does not come
    try:
        all_reduce(torch.ones(3), group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


@pytest.mark.slow
def test_a_failure_that_is_over_explains_no_later_timeout(world2: World) -> None:
    waiting, _ = world2.run(_is_waited_for_in_silence)
    assert waiting.startswith("RuntimeError: ")
    assert "long ago" not in waiting


def _store_timeouts() -> tuple[timedelta, timedelta]:
    store: Any = default_store()
    before = store.timeout
    _fail(1, ValueError("whatever"))
    return before, store.timeout


def test_a_failure_leaves_the_patience_of_the_store_as_it_was(world2: World) -> None:
    for before, after in world2.run(_store_timeouts):
        assert before == after


_OPERATOR = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from vescale_dtensor import PeerError, distribute_tensor

rank, directory = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
values = distribute_tensor(torch.arange(4.0), mesh, (Replicate(),))
indices = distribute_tensor(torch.tensor([0, 1, 2, 9]), mesh, (Shard(0),))
try:
    found = values.index_select(0, indices)
    found.sum().item()
except PeerError as error:
    print("waited:", error)
"""


@pytest.mark.slow
def test_what_an_operator_raises_on_one_rank_is_told_by_the_rank_that_waits(
    tmp_path: Path,
) -> None:
    # The world's timeout is half an hour: it is the end of the other process that is noticed.
    waiting, failing = (
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _OPERATOR, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    )
    try:
        assert "IndexError" in failing.communicate(timeout=240)[0]
        output, _ = waiting.communicate(timeout=20)
    finally:
        waiting.kill()
    assert "waited: rank 1 raised IndexError: index out of range" in output, output


_UNCAUGHT = """
import sys
import torch, torch.distributed as dist
from vescale_dtensor import all_reduce

rank, directory = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
all_reduce(torch.ones(3), dist.group.WORLD)
if rank == 1:
    raise KeyError("a line of the program's own")
dist.barrier()
"""


@pytest.mark.slow
def test_what_ends_a_program_is_noted_on_the_error_of_a_rank_in_a_collective_of_its_own(
    tmp_path: Path,
) -> None:
    waiting, failing = (
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _UNCAUGHT, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    )
    try:
        assert "KeyError" in failing.communicate(timeout=240)[0]
        output, _ = waiting.communicate(timeout=20)
    finally:
        waiting.kill()
    assert 'rank 1 raised KeyError: "a line of the program\'s own"' in output, output


def _lose_the_connection(other: str) -> str:
    """Return what rank 1 is told, whose connection rank 0 closes a second before it says why."""
    for _ in range(2):  # after the first, ranks take back what they told in tests before this
        all_reduce(torch.ones(3), _group())
    everybody: Any = SimpleNamespace(group=None)
    try:
        if dist.get_rank() == 1:
            with named_failures(of=Collective("all_reduce", everybody, lambda _: "dp")):
                raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        time.sleep(1)
        if other == "raises":
            with announced_failures():
                raise KeyError("lost the data")
        if other == "waits":
            with named_failures(of=Collective("broadcast", everybody, lambda _: "tp")):
                raise RuntimeError("Connection closed by peer [127.0.0.1]:2")
    except (RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("raises", "rank 0 raised KeyError"),
        ("waits", "in broadcast over tp of ranks 0, 1"),
        ("is killed", "a rank's process ended without a word"),
    ],
)
def test_a_rank_whose_connection_closes_hears_who_closed_it_before_it_raises(
    world2: World, other: str, told: str
) -> None:
    report = world2.run(_lose_the_connection, other)[1]
    assert report.startswith("PeerError"), report
    assert told in report, report
    assert ("Ranks came to different places" in report) == (other == "waits"), report


def test_an_error_without_a_job_stays_what_it_is() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"^gone$"), named_failures():
        raise RuntimeError("gone")
