"""The path of a checkpoint always holds a whole one."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._comm import control_group
from vescale_ckpt._comm.control_group import ControlGroup
from vescale_ckpt._comm.hosts import this_host
from vescale_ckpt._load.fill import fill
from vescale_ckpt._load.read_items import read_items_of
from vescale_ckpt._state.local_shards import local_shard_of
from vescale_ckpt._store import atomic_directory
from vescale_ckpt._store.reader import CheckpointReader
from vescale_dtensor import distribute_tensor
from vescale_testing import RankError, World


def state_of(number: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((1000,), float(number)), "b": torch.full((3,), number)},
        "step": number,
    }


def number_at(path: Path) -> int:
    """Load a checkpoint, check that it is of one piece, and return which one it is."""
    state = state_of(-1)
    number = vescale_ckpt.load(path, state)["step"]
    assert torch.equal(state["model"]["w"], torch.full((1000,), float(number)))
    assert torch.equal(state["model"]["b"], torch.full((3,), number))
    return number


def test_a_save_replaces_the_checkpoint_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    for number in range(3):
        vescale_ckpt.save(path, state_of(number))
        assert number_at(path) == number
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system on which directories cannot change places."""

    def cannot(a: Path, b: Path) -> bool:
        return False

    monkeypatch.setattr(atomic_directory, "swap_directories", cannot)


@pytest.mark.usefixtures("no_exchange")
def test_a_save_replaces_the_checkpoint_where_directories_cannot_change_places(
    tmp_path: Path,
) -> None:
    for number in range(2):
        vescale_ckpt.save(tmp_path / "ckpt", state_of(number))
    assert number_at(tmp_path / "ckpt") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_an_interrupted_replacement_is_read_and_then_put_back(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    vescale_ckpt.save(path, state_of(1))
    aside = tmp_path / ".ckpt.0123.replaced"
    path.rename(aside)
    (tmp_path / ".ckpt.0123.saving").mkdir()
    assert number_at(path) == 1
    with pytest.raises(CheckpointError, match="cannot store"):
        vescale_ckpt.save(path, {"x": object()})
    assert number_at(path) == 1
    vescale_ckpt.save(path, state_of(2))
    assert number_at(path) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_a_directory_with_other_things_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="holds files but no checkpoint"):
        vescale_ckpt.save(tmp_path / "home", state_of(1))
    with pytest.raises(CheckpointError, match="is no directory"):
        vescale_ckpt.save(tmp_path / "home" / "thesis.tex", state_of(1))
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_files_put_beside_the_tensors_stay(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    vescale_ckpt.save(path, state_of(1))
    (path / "config.json").write_text("{}")
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocab.txt").write_text("a b c")
    vescale_ckpt.save(path, {"other": torch.ones(1)})
    names = {entry.name for entry in path.iterdir()}
    assert names == {"config.json", "tensors.safetensors", "tokenizer", "vescale.json"}
    assert (path / "tokenizer" / "vocab.txt").read_text() == "a b c"


def test_what_a_live_writer_is_writing_is_left_alone(tmp_path: Path) -> None:
    live = atomic_directory.StagedDirectory(tmp_path / "ckpt", "aa")
    dead = tmp_path / ".ckpt.bb.saving"
    dead.mkdir()
    vescale_ckpt.save(tmp_path / "ckpt", state_of(1))
    assert live.directory.is_dir()
    assert not dead.exists()
    live.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


@contextmanager
def max_file_nbytes(nbytes: int) -> Iterator[None]:
    """Let the kernel refuse to write more than so much into one file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_grow_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", state_of(1))
    with max_file_nbytes(6000), pytest.raises(CheckpointError, match="File too large"):
        vescale_ckpt.save(tmp_path / "ckpt", state_of(2))
    assert number_at(tmp_path / "ckpt") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_two_jobs_that_save_to_one_path_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    vescale_ckpt.save(path, state_of(0))
    errors: list[BaseException] = []

    def job(first: int) -> None:
        try:
            for number in range(first, first + 10):
                vescale_ckpt.save(path, state_of(number))
        except BaseException as error:
            errors.append(error)

    jobs = [threading.Thread(target=job, args=(first,)) for first in (100, 200)]
    for thread in jobs:
        thread.start()
    seen: set[int] = set()
    while any(thread.is_alive() for thread in jobs):
        seen.add(number_at(path))
    assert errors == []
    assert number_at(path) in (109, 209)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_a_reader_finishes_what_it_has_opened(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    vescale_ckpt.save(path, state_of(1))
    target = torch.zeros(1000)
    with CheckpointReader(path) as reader:
        vescale_ckpt.save(path, state_of(2))
        items = read_items_of(reader.manifest, [(local_shard_of("w", target, 0), "model.w")])
        fill(reader, items, ControlGroup(0, 1, None), [this_host()])
    assert torch.equal(target, torch.ones(1000))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _count_down(effects: int) -> Callable[[], None]:
    remaining = [effects]

    def step() -> None:
        if remaining[0] == 0:
            _die()
        remaining[0] -= 1

    return step


def _hooked(function: Callable[..., Any], step: Callable[[], None]) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        step()
        return function(*args, **kwargs)

    return hooked


# Everything by which a save changes a disk or waits for others.
_EFFECTS = [
    (os, "mkdir"),
    (os, "open"),
    (os, "posix_fallocate"),
    (os, "pwrite"),
    (os, "fsync"),
    (os, "rename"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "close"),
    (atomic_directory, "swap_directories"),
    (dist, "all_gather"),
]


def distributed_state(number: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = state_of(number)
    return {
        "model": {
            key: distribute_tensor(tensor, mesh, (Shard(0),))
            for key, tensor in state["model"].items()
        },
        "step": number,
    }


def save_all(path: str, number: int) -> None:
    vescale_ckpt.save(path, distributed_state(number))


Save = Callable[[str, dict[str, Any]], None]


def save_in_background(path: str, state: dict[str, Any]) -> None:
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(path, state)


def be_impatient() -> None:
    """Let the survivors find out quickly which rank has died."""
    control_group._MAX_PATIENCE = timedelta(milliseconds=20)


def save_and_die(path: str, number: int, rank: int, effects: int, save: Save) -> None:
    """Save, but let ``rank`` be killed just before it has had ``effects`` more effects."""
    be_impatient()
    state = distributed_state(number)
    dist.barrier()
    if dist.get_rank() == rank:
        step = _count_down(effects)
        for module, name in _EFFECTS:
            setattr(module, name, _hooked(getattr(module, name), step))
    save(path, state)
    _die()


def _kill_and_check(world: World, path: Path, rank: int, effects: int, save: Save) -> int:
    world.run(save_all, str(path), 1)
    with pytest.raises(RankError):
        world.run(save_and_die, str(path), 2, rank, effects, save, timeout=20)
    number = number_at(path)
    assert number in (1, 2)
    world.run(save_all, str(path), 3)
    assert number_at(path) == 3
    assert [entry.name for entry in path.parent.iterdir()] == ["ckpt"]
    return number


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "effects"), [(0, 4), (0, 19), (0, 33), (1, 1), (1, 5)])
def test_a_killed_rank_leaves_the_old_checkpoint_or_the_new(
    world2: World, tmp_path: Path, rank: int, effects: int
) -> None:
    _kill_and_check(world2, tmp_path / "ckpt", rank, effects, vescale_ckpt.save)


def test_a_rank_killed_while_saving_in_the_background_leaves_the_old_checkpoint_or_the_new(
    world2: World, tmp_path: Path
) -> None:
    _kill_and_check(world2, tmp_path / "ckpt", 0, 20, save_in_background)


@pytest.mark.nightly
@pytest.mark.parametrize("save", [vescale_ckpt.save, save_in_background])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("effects", range(64))
def test_a_rank_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new(
    world2: World, tmp_path: Path, rank: int, effects: int, save: Save
) -> None:
    _kill_and_check(world2, tmp_path / "ckpt", rank, effects, save)


def large_state(number: int) -> dict[str, Any]:
    """Return a state with large column shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {
        str(i): distribute_tensor(torch.full((1000, 1000), float(number)), mesh, (Shard(1),))
        for i in range(5)
    }
    return {**distributed_state(number), "weights": weights}


def save_large(path: str, number: int) -> None:
    vescale_ckpt.save(path, large_state(number))


def save_and_die_some_time(path: str, number: int, rank: int, seconds: float) -> None:
    """Save, and let ``rank`` be killed at some moment meanwhile."""
    be_impatient()
    state = large_state(number)
    dist.barrier()
    if dist.get_rank() == rank:
        threading.Timer(seconds, _die).start()
    vescale_ckpt.save(path, state)
    threading.Event().wait()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_a_rank_killed_at_a_random_moment_leaves_the_old_checkpoint_or_the_new(
    world2: World, tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "ckpt"
    world2.run(save_large, str(path), 1)
    chooser = random.Random(seed)
    arguments = (str(path), 2, chooser.randrange(2), chooser.uniform(0, 0.15))
    with pytest.raises(RankError):
        world2.run(save_and_die_some_time, *arguments, timeout=20)
    saved = {**state_of(-1), "weights": {str(i): torch.zeros(1000, 1000) for i in range(5)}}
    number = vescale_ckpt.load(path, saved)["step"]
    assert number in (1, 2)
    tensors = [*saved["model"].values(), *saved["weights"].values()]
    assert all(bool((tensor == number).all()) for tensor in tensors)
    world2.run(save_all, str(path), 3)
    assert number_at(path) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]
