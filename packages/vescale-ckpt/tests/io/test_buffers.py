"""Buffers: kept from one save to the next, back whatever goes wrong, and few."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_ckpt import CheckpointError, load, save
from vescale_ckpt._format.byte_ranges import Bytes
from vescale_ckpt._io import buffer_pool as scratch, file_writer as stream
from vescale_ckpt._io.thread_pool import parallel_for
from vescale_dtensor import distribute_tensor
from vescale_testing import World
from vescale_testing.memory import peak_nbytes


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by what is allocated for buffers; none is kept at first."""
    lengths: list[int] = []
    pages = scratch.pages

    def counted(nbytes: int) -> Bytes:
        lengths.append(nbytes)
        return pages(nbytes)

    monkeypatch.setattr(scratch, "pages", counted)
    monkeypatch.setattr(scratch, "_kept", [])
    return lengths


def test_later_saves_and_loads_allocate_no_buffers(tmp_path: Path, allocated: list[int]) -> None:
    state = {"w": torch.randn(3 << 20)}
    save(tmp_path / "step-1", state)
    first = len(allocated)
    assert 0 < first <= 4
    save(tmp_path / "step-2", state)
    filled = load(tmp_path / "step-2", {"w": torch.zeros(3 << 20)})
    assert len(allocated) == first
    assert torch.equal(filled["w"], state["w"])


def test_kept_memory_is_bounded(allocated: list[int]) -> None:
    for buffer in [scratch.take_buffer() for _ in range(20)]:
        scratch.keep_buffer(buffer)
    assert sum(map(len, scratch._kept)) <= 17 << 20


def test_saves_side_by_side_do_not_share_buffers(tmp_path: Path, allocated: list[int]) -> None:
    states = [{"w": torch.full((3 << 20,), float(number))} for number in range(3)]

    def save_and_load(number: int) -> None:
        for _ in range(3):
            save(tmp_path / str(number), states[number])
            load(tmp_path / str(number), {"w": torch.zeros(3 << 20)})

    threads = [threading.Thread(target=save_and_load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, state in enumerate(states):
        filled = load(tmp_path / str(number), {"w": torch.zeros(3 << 20)})
        assert torch.equal(filled["w"], state["w"])


def test_a_failed_write_is_raised_and_ends_the_writing(allocated: list[int]) -> None:
    written: list[str] = []

    def fail() -> None:
        raise OSError(errno.EIO, "the disk is gone")

    with stream.Buffers() as buffers:
        buffers.give(buffers.take(), fail)
        with pytest.raises(OSError, match="the disk is gone"):
            buffers.wait()
        with pytest.raises(OSError, match="the disk is gone"):
            buffers.take()
        buffers.give(buffers._empty.get(), lambda: written.append("more"))
        buffers.stop()
        with pytest.raises(RuntimeError, match="have been stopped"):
            buffers.give(buffers._empty.get(), lambda: written.append("more"))
    assert not written


def test_after_a_failed_save_the_next_one_is_whole(
    tmp_path: Path, allocated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(9 << 20)}
    write = stream._write

    def write_or_fail(descriptor: int, offset: int, view: memoryview) -> None:
        if offset <= 8 << 20 < offset + len(view):
            raise OSError(errno.EIO, "the disk is gone")
        write(descriptor, offset, view)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_write", write_or_fail)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            save(tmp_path / "step-1", state)
    save(tmp_path / "step-2", state)
    assert torch.equal(load(tmp_path / "step-2", {"w": torch.zeros(9 << 20)})["w"], state["w"])


class InterruptedAsItStarts(threading.Thread):
    def start(self) -> None:
        super().start()
        raise KeyboardInterrupt


def test_no_thread_goes_on_whose_start_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", InterruptedAsItStarts)
        with pytest.raises(KeyboardInterrupt):
            stream.Buffers()
    for thread in threading.enumerate():
        if thread.name == "vescale-ckpt-write":
            thread.join(5)
            assert not thread.is_alive()


def test_no_thread_reads_on_behind_a_load_that_was_interrupted() -> None:
    begun: list[int] = []
    ended: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        threading.Event().wait(0.1)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        parallel_for(work, range(100))
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 20


INTERRUPTED = """
import os, signal, sys, threading, time, torch
from vescale_ckpt import load, save
from vescale_ckpt._io import file_writer

state = {"w": torch.randn(16 << 20)}
write, begun = file_writer._write, threading.Event()

def write_slowly(descriptor, offset, view):
    begun.set()
    time.sleep(0.1)
    write(descriptor, offset, view)

def interrupt():
    begun.wait()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
file_writer._write = write_slowly
threading.Thread(target=interrupt).start()
try:
    save(sys.argv[1] + "-1", state)
except KeyboardInterrupt:
    assert not any(t.name == "vescale-ckpt-write" for t in threading.enumerate())
    file_writer._write = write
    save(sys.argv[1] + "-2", state)
    filled = load(sys.argv[1] + "-2", {"w": torch.zeros(16 << 20)})
    assert torch.equal(filled["w"], state["w"])
    print("interrupted")
"""


def test_an_interrupted_save_ends(tmp_path: Path) -> None:
    # pytest's workers do not listen to interrupts.
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, tmp_path / "step"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    assert ended.stdout == "interrupted\n"
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize("startable", [0, 1])
def test_a_save_needs_no_threads_of_its_own_and_keeps_none(
    allocated: list[int], monkeypatch: pytest.MonkeyPatch, startable: int, tmp_path: Path
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()
    state = {"w": torch.randn(9 << 20)}

    def start_some(thread: threading.Thread) -> None:
        if len(started) == startable:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)
        started.append(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_some)
        save(tmp_path / "step", state)
    assert not any(thread.is_alive() for thread in started)
    assert torch.equal(load(tmp_path / "step", {"w": torch.zeros(9 << 20)})["w"], state["w"])


def test_without_threads_the_first_failure_is_told(
    allocated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def fail() -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    with stream.Buffers() as buffers:
        first, second = buffers.take(), buffers.take()
        buffers.give(first, fail)
        with pytest.raises(OSError, match="the disk is gone"):
            buffers.wait()
        buffers.stop()
        with pytest.raises(RuntimeError, match="have been stopped"):
            buffers.give(second, fail)


def test_buffers_that_went_missing_are_not_waited_for(allocated: list[int]) -> None:
    written: list[str] = []
    with stream.Buffers() as buffers:
        buffers.take()  # and then an interrupt
        buffers.give(buffers.take(), lambda: written.append("all"))
        buffers.stop()
        assert written == ["all"]


PLACEMENTS: dict[str, Placement] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "copies": Replicate(),
}


def memory_to_save_and_load(path: str, placement: Placement) -> list[int]:
    """Save and load 96 MB, and return how much more memory each has taken than there was."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        str(number): distribute_tensor(torch.randn(1024, 3072), mesh, [placement])
        for number in range(8)
    }
    scratch._kept.clear()
    taken: list[int] = []
    for action in (save, load):
        before = peak_nbytes(reset=True)
        action(path, state)
        taken.append(peak_nbytes() - before)
    return taken


@pytest.mark.parametrize("layout", PLACEMENTS)
def test_a_rank_needs_little_memory_beside_the_state(
    world2: World, tmp_path: Path, layout: str
) -> None:
    ranks = world2.run(memory_to_save_and_load, str(tmp_path / "step-1"), PLACEMENTS[layout])
    assert max(nbytes for taken in ranks for nbytes in taken) < 32 << 20
