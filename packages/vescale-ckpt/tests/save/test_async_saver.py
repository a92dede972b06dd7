from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import vescale_ckpt
from vescale_ckpt import AsyncSaver, CheckpointError
from vescale_ckpt._io import file_writer
from vescale_ckpt._save import async_saver
from vescale_ckpt._save.host_staging import in_pieces
from vescale_dtensor import distribute_tensor
from vescale_testing import World


def test_what_changes_after_save_returned_is_not_saved(tmp_path: Path) -> None:
    weight = torch.ones(100_000)
    state: dict[str, Any] = {"a": {"w": weight, "tied": weight, "t": weight.view(100, 1000).t()}}
    state["values"] = [1]
    with AsyncSaver() as saver:
        saver.save(tmp_path / "ckpt", state)
        weight.zero_()
        state["values"].append(2)
    target: dict[str, Any] = {
        "a": {
            "w": torch.zeros(100_000),
            "tied": torch.zeros(100_000),
            "t": torch.zeros(1000, 100),
        },
        "values": None,
    }
    loaded = vescale_ckpt.load(tmp_path / "ckpt", target)
    assert loaded["values"] == [1]
    assert all(bool((tensor == 1).all()) for tensor in target["a"].values())


def test_an_error_surfaces_at_the_next_call_and_not_again(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        saver.save(tmp_path / "ckpt", {"x": object()})
        with pytest.raises(CheckpointError, match="in the background failed: cannot store 'x'"):
            saver.save(tmp_path / "ckpt", {"x": 1})
        saver.save(tmp_path / "ckpt", {"x": 2})
    assert vescale_ckpt.load(tmp_path / "ckpt", {"x": 0}) == {"x": 2}


def test_an_error_surfaces_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is no directory"), AsyncSaver() as saver:
        saver.save(tmp_path / "file", {"x": 1})


def test_how_far_a_save_has_come_can_be_seen(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        assert saver.written_nbytes == 0
        saver.save(tmp_path / "ckpt", {"w": torch.ones(1000, 1000)})
        saver.wait()
        assert saver.written_nbytes == (tmp_path / "ckpt" / "tensors.safetensors").stat().st_size
        assert not saver.is_saving


FORGOTTEN = """
import vescale_ckpt
saver = vescale_ckpt.AsyncSaver()
saver.save("/proc/no/such/place", {"x": 1})
"""


def test_a_failure_that_nobody_asks_for_is_printed_at_the_end() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, check=False
    )
    assert "the last save in the background failed, and nothing waited for it" in ended.stderr
    assert "/proc/no" in ended.stderr


UNFINISHED = """
import sys, threading, time, torch, vescale_ckpt
from vescale_ckpt._save import save as save_module

if "://" in sys.argv[1]:  # something to replace
    vescale_ckpt.save(sys.argv[1], {"w": torch.ones(1 << 20)})

def agree_late(*args, plan_save=save_module.plan_save):
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    time.sleep(0.1)
    return plan_save(*args)

save_module.plan_save = agree_late
saver = vescale_ckpt.AsyncSaver()
saver.save(sys.argv[1], {"w": torch.ones(3 << 20)}, layout=sys.argv[2])
"""


@pytest.mark.parametrize("layout", ["shared", "per_rank"])
def test_a_save_is_finished_that_the_program_does_not_wait_for(
    tmp_path: Path, layout: str
) -> None:
    path = tmp_path / "ckpt"
    subprocess.run([sys.executable, "-c", UNFINISHED, path, layout], check=True, timeout=120)
    assert bool((vescale_ckpt.load(path, {"w": torch.zeros(3 << 20)})["w"] == 1).all())


def test_a_save_that_the_program_does_not_wait_for_replaces_one_in_a_store() -> None:
    url = "memory://checkpoint"
    ended = subprocess.run(
        [sys.executable, "-c", UNFINISHED, url, "per_rank"],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert ended.stderr == ""


def test_memory_of_one_save_serves_the_next(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        addresses: set[int] = set()
        for step in range(3):
            saver.save(tmp_path / "ckpt", {"w": torch.full((1000,), float(step))})
            addresses.add(saver._staging._pieces[0].data_ptr())  # pyright: ignore[reportPrivateUsage]
        assert len(addresses) == 1


def test_an_interrupted_wait_is_no_end_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, gate, has_begun = file_writer._write, threading.Event(), threading.Event()

    def write_late(descriptor: int, offset: int, view: memoryview) -> None:
        if not has_begun.is_set():
            has_begun.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        gate.wait()
        write(descriptor, offset, view)

    monkeypatch.setattr(file_writer, "_write", write_late)
    weight = torch.ones(3 << 20)
    saver = AsyncSaver()

    def save_and_wait() -> None:
        saver.save(tmp_path / "step-1", {"w": weight})
        saver.wait()

    with pytest.raises(KeyboardInterrupt):
        save_and_wait()
    assert saver.is_saving
    threading.Timer(0.2, gate.set).start()
    saver.save(tmp_path / "step-2", {"w": weight.mul_(2)})
    saver.wait()
    for step in (1, 2):
        target = torch.zeros(3 << 20)
        vescale_ckpt.load(tmp_path / f"step-{step}", {"w": target})
        assert bool((target == step).all())


class Unstartable(threading.Thread):
    """A thread of a save that is neither made nor refused, but fails otherwise on rank 1."""

    def start(self) -> None:
        if self.name == "vescale-ckpt-save" and dist.get_rank() == 1:
            raise MemoryError("no memory for a stack")
        super().start()


def save_where_a_thread_fails(path: str) -> str:
    saver = AsyncSaver(timeout=timedelta(seconds=30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Thread", Unstartable)
        saver.save(path, {"x": 1})
        with pytest.raises(CheckpointError) as raised:
            saver.wait()
    with saver:
        saver.save(path, {"x": 2})
    return str(raised.value)


def test_what_keeps_the_thread_of_one_rank_from_starting_is_told_to_all(
    world2: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "ckpt")
    for message in world2.run(save_where_a_thread_fails, path):
        assert "failed: MemoryError: no memory for a stack (on rank 1)" in message
    assert vescale_ckpt.load(path, {"x": 0}) == {"x": 2}


class Lazy(threading.Thread):
    """A thread whose start is interrupted before there is one."""

    def start(self) -> None: ...


def test_a_save_that_never_begins_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_saver, "_START_SECONDS", 0.01)
    saver = AsyncSaver()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Lazy)
        saver.save(tmp_path / "ckpt", {"x": 1})
        with pytest.raises(CheckpointError, match="never began, nothing was saved"):
            saver.wait()
    with saver:
        saver.save(tmp_path / "ckpt", {"x": 2})
    assert vescale_ckpt.load(tmp_path / "ckpt", {"x": 0}) == {"x": 2}


class InterruptedAsItRuns(threading.Thread):
    """A thread that has begun when a handler of signals raises an error in its start."""

    def start(self) -> None:
        super().start()
        if self.name == "vescale-ckpt-save":
            raise RuntimeError("time is up")


def test_a_thread_that_runs_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(async_saver, "write_checkpoint", lambda *_, **__: calls.append(_))
    monkeypatch.setattr(threading, "Thread", InterruptedAsItRuns)
    with AsyncSaver() as saver:
        saver.save(tmp_path / "ckpt", {"x": 1})
    assert len(calls) == 1


def test_pieces_of_pinned_memory_waste_little() -> None:
    chooser = random.Random(0)
    for longest in (1 << 10, 1 << 20, 33 << 20, 700 << 20):
        lengths = [64 * chooser.randint(1, longest // 64) for _ in range(200)]
        pieces, starts = in_pieces(lengths)
        assert all(piece & (piece - 1) == 0 for piece in pieces)  # what torch rounds up to
        assert sum(pieces) <= 1.1 * sum(lengths) + (4 << 20)
        assert len(pieces) < 40
        ends = [-1, 0]
        for (piece, start), length in zip(starts, lengths, strict=True):
            assert (piece, start) >= (ends[0], ends[1] if piece == ends[0] else 0)
            assert start + length <= pieces[piece]
            ends = [piece, start + length]
    assert in_pieces([]) == ([], [])


@pytest.mark.gpu
def test_memory_of_a_state_on_the_gpu_is_pinned(tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    with AsyncSaver() as saver:
        for step in range(2):
            state = {key: torch.full((3 << 20,), step, device="cuda") for key in "abc"}
            saver.save(tmp_path / "ckpt", state)
            pieces = saver._staging._pieces  # pyright: ignore[reportPrivateUsage]
            assert all(piece.is_pinned() for piece in pieces)
            assert sum(piece.nbytes for piece in pieces) <= 1.4 * sum(
                tensor.nbytes for tensor in state.values()
            )
    assert torch.equal(vescale_ckpt.load(tmp_path / "ckpt", state)["b"], state["b"])


def save_without_rank_1(path: str) -> str:
    """Save on all ranks, then on all but one, and return the error."""
    timeout = timedelta(seconds=1)
    vescale_ckpt.save(path, {"x": 1}, timeout=timeout)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(CheckpointError) as caught:
        vescale_ckpt.save(path, {"x": 2}, timeout=timeout)
    return str(caught.value)


def test_each_save_holds_its_own_state_whatever_the_one_before_held(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    states: list[dict[str, Any]] = [
        {"a": weight, "b": torch.arange(300)},
        {"a": weight, "b": torch.arange(300.0)},  # another dtype
        {"a": weight},
        {"a": weight, "b": weight[100:900], "c": weight.view(10, 100).t()},
        {"b": torch.rand(5000), "none": torch.empty(0), "a": weight},
        {"a": weight},
    ]
    with AsyncSaver() as saver:
        for step, state in enumerate([*states, *states]):
            weight.fill_(step)
            wanted = {key: tensor.clone() for key, tensor in state.items()}
            saver.save(tmp_path / str(step), state)
            weight.fill_(-1)
            saver.wait()
            target = {key: torch.full_like(tensor, 7) for key, tensor in state.items()}
            vescale_ckpt.load(tmp_path / str(step), target)
            assert all(torch.equal(target[key], wanted[key]) for key in wanted), step


def test_a_rank_that_does_not_come_is_named(world4: World, tmp_path: Path) -> None:
    messages = world4.run(save_without_rank_1, str(tmp_path / "ckpt"))
    for rank in (0, 2, 3):
        assert "rank 1 has died or hangs before the first barrier" in messages[rank]
    assert vescale_ckpt.load(tmp_path / "ckpt", {"x": 0}) == {"x": 1}


def save_while_training(path: str) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors: list[str] = []
    with AsyncSaver() as saver:
        for step in range(5):
            full = torch.full((300, 7), float(step))
            state = {
                "rows": distribute_tensor(full, mesh, (Shard(0),)),
                "copies": distribute_tensor(full, mesh, (Replicate(),)),
                "plain": full,
                "step": step if step != 2 or dist.get_rank() == 0 else -1,
            }
            try:
                saver.save(path, state)
            except CheckpointError as error:
                errors.append(str(error))
                saver.save(path, state)
            full.fill_(-1)
            for _ in range(20):
                dist.all_reduce(torch.ones(1000))
    return errors


def test_training_collectives_and_a_save_in_the_background_do_not_meet(
    world4: World, tmp_path: Path
) -> None:
    for errors in world4.run(save_while_training, str(tmp_path / "ckpt")):
        assert len(errors) == 1
        assert "'step': -1 on ranks 1, 2, 3; 2 on rank 0" in errors[0]
    full = torch.full((300, 7), 4.0)
    target = {key: torch.zeros(300, 7) for key in ("rows", "copies", "plain")}
    assert vescale_ckpt.load(tmp_path / "ckpt", {**target, "step": 0})["step"] == 4
    assert all(torch.equal(tensor, full) for tensor in target.values())
