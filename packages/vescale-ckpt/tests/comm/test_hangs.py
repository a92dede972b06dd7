"""A rank that stops in the middle of a save or a load is named by all others."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import AsyncSaver, CheckpointError
from vescale_ckpt._comm import control_group
from vescale_ckpt._comm.missing_ranks import Arrivals
from vescale_ckpt._save import async_saver, save as save_module
from vescale_dtensor import distribute_tensor
from vescale_testing import RankError, World

Action = Callable[[str, timedelta], None]

# How the errors call these.
NAMES = {
    "all_gather": "an exchange of messages",
    "all_reduce": "a reduction",
    "all_to_all_single": "an exchange of bytes",
}


class _StopsError(BaseException):
    """Takes a rank out of a save or a load, without a word to the others."""


def tensors(placement: Placement) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(2_000_000.0).reshape(1000, 2000)
    return {"w": distribute_tensor(full, mesh, (placement,))}


def save(path: str, timeout: timedelta) -> None:
    vescale_ckpt.save(path, tensors(Shard(1)), timeout=timeout)


def save_aside(path: str, timeout: timedelta) -> None:
    with AsyncSaver(timeout=timeout) as saver:
        saver.save(path, tensors(Shard(1)))


def load(path: str, timeout: timedelta) -> None:
    vescale_ckpt.load(path, tensors(Replicate()), exchange=True, timeout=timeout)


def stopping(*args: Any, **kwargs: Any) -> Any:
    raise _StopsError


class Case(NamedTuple):
    """Rank 1 stops instead of calling a collective for the ``call``-th time."""

    action: Action
    collective: str
    call: int


CASES = [
    Case(save, "all_gather", 2),
    Case(save, "all_to_all_single", 1),
    Case(save_aside, "all_reduce", 1),
    Case(load, "all_gather", 1),
    Case(load, "all_to_all_single", 1),
]


def message_when_rank_1_stops(path: str, number: int) -> str:
    action, collective, call = CASES[number]
    timeout = timedelta(seconds=2)
    original = getattr(dist, collective)
    calls = [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return (stopping if calls[0] == call else original)(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(dist, collective, counting)
        try:
            action(path, timeout)
        except _StopsError:
            return "stopped"
        except CheckpointError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_rank_that_stops_midway_is_named_on_every_other(
    world4: World, tmp_path: Path, number: int
) -> None:
    path = str(tmp_path / "ckpt")
    vescale_ckpt.save(path, {"w": torch.zeros(1000, 2000)})
    messages = world4.run(message_when_rank_1_stops, path, number)
    assert messages[1] == "stopped"
    where = NAMES[CASES[number].collective]
    for rank in (0, 2, 3):
        assert f"rank 1 has died or hangs before {where}; nothing more was" in messages[rank]
    state = {"w": torch.ones(1000, 2000)}
    vescale_ckpt.load(path, state)
    assert torch.equal(state["w"], torch.zeros(1000, 2000))


def make_groups_without(absent: tuple[int, ...]) -> str:
    if dist.get_rank() in absent:
        return "absent"
    with pytest.raises(CheckpointError) as caught:
        AsyncSaver(timeout=timedelta(seconds=1))
    return str(caught.value)


def test_ranks_that_do_not_come_to_the_first_save_are_named(world4: World) -> None:
    try:
        messages = world4.run(make_groups_without, (1, 3))
    finally:
        world4.close()  # torch counts groups, and the ranks differ now
    for rank in (0, 2):
        assert "ranks 1, 3 have died or hang before the making of a process" in messages[rank]


def die_midway(path: str) -> None:
    def dies(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 2:
        dist.all_to_all_single = dies
    save(path, timedelta(seconds=20))


def test_a_rank_that_dies_midway_is_named_at_once(world4: World, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        world4.run(die_midway, str(tmp_path / "ckpt"))
    errors = caught.value.exceptions
    assert set(errors) == {0, 1, 3}
    for error in errors.values():
        assert "rank 2 has died or hangs before an exchange of bytes" in str(error)


def serve_a_store(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_does_not_answer_keeps_nobody_waiting(number: signal.Signals) -> None:
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    server = context.Process(target=serve_a_store, args=(theirs,), daemon=True)
    server.start()
    port = pipe.recv()
    one, other = (
        Arrivals(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), rank, 3)
        for rank in (0, 2)
    )
    one.begin()
    other.begin()
    other.note()
    assert one.missing(timedelta(seconds=2)) == [1]
    assert server.pid is not None
    os.kill(server.pid, number)
    assert other.missing(timedelta(seconds=0.1)) is None
    server.kill()
    server.join()


def test_a_rank_that_can_start_no_thread_notes_its_arrival_and_asks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one, other = Arrivals(store, 0, 3), Arrivals(store, 2, 3)
    one.begin()
    other.begin()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot)
        other.note()
        assert other.missing(timedelta(seconds=2)) is None
    assert one.missing(timedelta(seconds=2)) == [1]


LENDING = """
import pathlib, sys, threading, time
import numpy as np
from vescale_ckpt._comm import control_group

held = [control_group._lent(np.zeros(3, dtype=np.uint8))]

def let_go():
    time.sleep(0.3)
    pathlib.Path(sys.argv[1]).touch()
    held.clear()

threading.Thread(target=let_go, daemon=True).start()
"""


def test_a_process_ends_after_the_threads_of_gloo_let_go_of_tensors(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LENDING, tmp_path / "done"], check=True, timeout=60)
    assert (tmp_path / "done").exists()


def _collectives_lend() -> None:
    gc.collect()  # errors of earlier jobs, with tracebacks that hold what was lent
    ranks = control_group.current_control_group()
    finish = control_group.ControlGroup._finish
    lent = list[int]()

    def note(self: control_group.ControlGroup, work: dist.Work | None) -> None:
        lent.append(len(control_group._LENT))
        finish(self, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_group.ControlGroup, "_finish", note)
        ranks.all_gather("a")
        ranks.reduce(np.zeros(3, dtype=np.int64), dist.ReduceOp.SUM)
        ranks.all_to_all(np.zeros(2, np.uint8), [1, 1], np.zeros(2, np.uint8), [1, 1])
    assert [n >= least for n, least in zip(lent, [3, 1, 2], strict=True)] == [True] * 3
    control_group._take_back()
    assert not control_group._LENT


def test_what_collectives_use_is_known_until_they_let_go_of_it(world2: World) -> None:
    world2.run(_collectives_lend)


class Interrupted:
    """Something whose state rank 1 does not get to hand out in time, or at all."""

    def __init__(self, interruption: type[BaseException] | None, come: threading.Event) -> None:
        self.interruption, self.come = interruption, come

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1 and self.interruption is not None:
            raise self.interruption
        if dist.get_rank() == 1:
            self.come.wait(2)  # longer than the others wait
        return {"x": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def save_once_more(
    path: str, interruption: type[BaseException] | None, aside: bool
) -> tuple[str, int]:
    timeout = timedelta(seconds=1 if interruption is None else 20)
    saver = vescale_ckpt.AsyncSaver(timeout=timeout) if aside else None

    def save(state: dict[str, Any]) -> None:
        if saver is None:
            vescale_ckpt.save(path, state, timeout=timeout)
        else:
            saver.save(path, state)
            saver.wait()

    with pytest.raises((CheckpointError, interruption or CheckpointError)) as raised:
        save({"object": Interrupted(interruption, threading.Event())})
    dist.barrier()
    save({"x": 2})
    return type(raised.value).__name__, vescale_ckpt.load(path, {"x": 0}, timeout=timeout)["x"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, None])
@pytest.mark.parametrize("aside", [False, True], ids=["save", "save_aside"])
def test_ranks_save_again_after_one_was_interrupted_or_late(
    world2: World, tmp_path: Path, interruption: type[BaseException] | None, aside: bool
) -> None:
    answers = world2.run(save_once_more, str(tmp_path / "ckpt"), interruption, aside)
    name = "CheckpointError" if interruption is None else interruption.__name__
    assert answers == [("CheckpointError", 2), (name, 2)]


def interrupt_the_wait_for_the_save_before(
    path: str, place: str, interruption: type[BaseException]
) -> tuple[list[str], list[int]]:
    """Save twice while rank 1 is interrupted as it waits for the first; then once more."""
    errors: list[str] = []
    saver = AsyncSaver(timeout=timedelta(seconds=30))
    opened = threading.Event()
    write = save_module.write_checkpoint

    def slow(*args: Any, **kwargs: Any) -> None:
        opened.wait(30)
        write(*args, **kwargs)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        opened.set()  # the save before goes on meanwhile
        raise interruption

    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_saver, "write_checkpoint", slow)
        saver.save(f"{path}/step-1", {"x": 1})
        if dist.get_rank() == 1:
            patch.setattr(*PLACES[place], interrupted)
        else:
            opened.set()
        try:
            saver.save(f"{path}/step-2", {"x": 2})
        except interruption:
            errors.append(interruption.__name__)
    try:
        saver.wait()
    except CheckpointError as error:
        errors.append(str(error))
    assert time.monotonic() - start < 20
    dist.barrier()
    with saver:
        saver.save(f"{path}/step-3", {"x": 3})
    loaded = [vescale_ckpt.load(f"{path}/step-{n}", {"x": 0})["x"] for n in (1, 3)]
    return errors, loaded


PLACES: dict[str, tuple[Any, str]] = {
    "before": (async_saver, "destination_of"),
    "waiting": (async_saver._Running, "wait"),
}


# A handler of signals may raise anything.
INTERRUPTIONS = [
    ("before", KeyboardInterrupt), ("waiting", KeyboardInterrupt), ("waiting", TimeoutError)
]  # fmt: skip


@pytest.mark.parametrize(("place", "interruption"), INTERRUPTIONS)
def test_a_rank_that_is_interrupted_as_it_waits_for_the_save_before_is_not_waited_for(
    world2: World, tmp_path: Path, place: str, interruption: type[BaseException]
) -> None:
    answers = world2.run(
        interrupt_the_wait_for_the_save_before, str(tmp_path), place, interruption
    )
    assert answers[1] == ([interruption.__name__], [1, 3])
    (error,), loaded = answers[0]
    assert "rank 1 has died or hangs before the first barrier" in error
    assert loaded == [1, 3]
    assert not (tmp_path / "step-2").exists()


def interrupted_as_ranks_meet(path: str, action: str) -> str:
    """Interrupt rank 1 where it waits for rank 0 to come; then save and load."""
    calls = {
        "save": lambda: vescale_ckpt.save(path, {"x": 2}, timeout=timedelta(seconds=30)),
        "load": lambda: vescale_ckpt.load(path, {"x": 0}, timeout=timedelta(seconds=30)),
    }
    calls["save"]()
    come = threading.Event()
    text = "no error"
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            # The barrier itself goes on: torch's thread is in it.
            patch.setattr(control_group.ControlGroup, "_finish", stopping)
        else:
            come.wait(1)
        try:
            calls[action]()
        except _StopsError:
            text = "stopped"
        except CheckpointError as error:
            text = str(error)
    assert time.monotonic() - start < 20
    dist.barrier()
    calls["save"]()
    return text


@pytest.mark.parametrize("action", ["save", "load"])
def test_a_rank_that_is_interrupted_as_ranks_meet_is_not_waited_for(
    world2: World, tmp_path: Path, action: str
) -> None:
    messages = world2.run(interrupted_as_ranks_meet, str(tmp_path / "ckpt"), action)
    assert messages[1] == "stopped"
    assert "rank 0 lost contact with the other ranks" in messages[0]
