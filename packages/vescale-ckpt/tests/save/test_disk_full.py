"""A save that finds the disk full says so and leaves the checkpoint before it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

import vescale_ckpt
from vescale_ckpt import AsyncSaver, CheckpointError
from vescale_ckpt._save.destination import FileLayout
from vescale_dtensor import distribute_tensor
from vescale_testing import World

NUMEL = 1 << 20  # 4 MiB: one state fits on the disk, two do not
DISK_NBYTES = 6 << 20
PAGE_NBYTES = 4096
FULL = "No space left on device"

Story = Callable[[Path, World], None]


def mount(directory: Path, options: str) -> str | None:
    """Mount a file system in memory; return why not if that is not permitted."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr


@contextmanager
def small_disk(directory: Path, options: str = f"size={DISK_NBYTES}") -> Iterator[Path]:
    disk = directory / "disk"
    disk.mkdir(exist_ok=True)
    reason = mount(disk, options)
    if reason is not None:
        pytest.skip(f"mounting is not permitted here: {reason}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def sharded(value: float, placement: Placement) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.full((1024, NUMEL // 1024), value), mesh, (placement,))


def message_of_save(
    path: str | Path, state: dict[str, Any], layout: FileLayout | None = None
) -> str | None:
    """Save and return the error, None if there is none."""
    try:
        vescale_ckpt.save(path, state, layout=layout)
    except CheckpointError as error:
        return str(error)
    return None


def save_sharded(path: str, value: float, layout: FileLayout) -> str | None:
    dim = 1 if layout == "shared" else 0
    return message_of_save(path, {"w": sharded(value, Shard(dim))}, layout)


def save_aside(path: str, value: float) -> str | None:
    saver = AsyncSaver()
    try:
        saver.save(path, {"w": sharded(value, Shard(0))})
        saver.wait()
    except CheckpointError as error:
        return str(error)
    return None


def value_at(path: Path | str) -> float:
    """Load on one device, check that the state is of one piece, and return which it is."""
    state = {"w": torch.zeros(1024, NUMEL // 1024)}
    vescale_ckpt.load(path, state)
    value = float(state["w"][0, 0])
    assert torch.equal(state["w"], torch.full_like(state["w"], value))
    return value


def check(disk: Path, messages: list[str | None], path: Path | str) -> None:
    """All ranks have heard of it, the checkpoint is the first one, and nothing else is left."""
    assert messages[0] == messages[1]
    assert FULL in str(messages[0])
    assert value_at(path) == 1.0
    assert [entry.name for entry in disk.iterdir()] == ["step-1"]


def ranks_that_save_beside_a_checkpoint(disk: Path, world: World) -> None:
    assert world.run(save_sharded, f"{disk}/step-1", 1.0, "shared") == [None] * 2
    check(disk, world.run(save_sharded, f"{disk}/step-2", 2.0, "shared"), disk / "step-1")
    assert vescale_ckpt.latest(disk) == disk / "step-1"


def ranks_that_replace_a_checkpoint(disk: Path, world: World) -> None:
    assert world.run(save_sharded, f"{disk}/step-1", 1.0, "shared") == [None] * 2
    layouts: list[FileLayout] = ["shared", "per_rank"]
    for layout in layouts:
        check(disk, world.run(save_sharded, f"{disk}/step-1", 2.0, layout), disk / "step-1")


def ranks_that_save_in_the_background(disk: Path, world: World) -> None:
    assert world.run(save_aside, f"{disk}/step-1", 1.0) == [None] * 2
    for name in ("step-2", "step-1"):
        check(disk, world.run(save_aside, f"{disk}/{name}", 2.0), disk / "step-1")


def ranks_that_save_to_a_file_url(disk: Path, world: World) -> None:
    url = f"file://{disk}/step-1"
    assert world.run(save_sharded, url, 1.0, "per_rank") == [None] * 2
    for name in ("step-2", "step-1"):
        check(disk, world.run(save_sharded, f"file://{disk}/{name}", 2.0, "per_rank"), url)


def a_save_with_room_again(disk: Path, world: World) -> None:
    filler = disk / "filler"
    filler.write_bytes(bytes(4 << 20))
    messages = world.run(save_sharded, f"{disk}/step-1", 1.0, "shared")
    assert FULL in str(messages[0])
    assert messages[0] == messages[1]
    assert [entry.name for entry in disk.iterdir()] == ["filler"]
    filler.unlink()
    assert world.run(save_sharded, f"{disk}/step-1", 1.0, "shared") == [None] * 2
    assert value_at(disk / "step-1") == 1.0


def every_number_of_free_pages(disk: Path, world: World) -> None:
    """Fill the disk so that each thing that a save writes is the first that finds no room."""
    del world
    path = disk / "ckpt"
    names = ("a", "b")
    vescale_ckpt.save(path, {name: {"w": torch.zeros(2000)} for name in names})
    saved: list[bool] = []
    for pages in range(16):
        space = os.statvfs(disk)
        filler = disk / "filler"
        filler.write_bytes(bytes((space.f_bavail - pages) * PAGE_NBYTES))
        message = message_of_save(
            path, {name: {"w": torch.full((2000,), pages + 1.0)} for name in names}
        )
        assert message is None or FULL in message
        saved.append(message is None)
        filler.unlink()
        loaded = {name: {"w": torch.ones(2000)} for name in names}
        vescale_ckpt.load(path, loaded)
        expected = (pages + 1.0) * saved[-1]
        assert all(torch.equal(loaded[n]["w"], torch.full((2000,), expected)) for n in names)
        assert [entry.name for entry in disk.iterdir()] == ["ckpt"]
        if saved[-1]:
            break
    assert saved[-1]
    assert saved.count(False) >= 4


STORIES: list[Story] = [
    ranks_that_save_beside_a_checkpoint,
    ranks_that_replace_a_checkpoint,
    ranks_that_save_in_the_background,
    ranks_that_save_to_a_file_url,
    a_save_with_room_again,
    every_number_of_free_pages,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_on_a_small_disk(
    tmp_path: Path, world2: World, request: pytest.FixtureRequest, story: Story
) -> None:
    if os.geteuid() == 0:
        with small_disk(tmp_path) as disk:
            story(disk, world2)
    else:
        outcome = outcome_in_a_namespace(str(request.config.rootpath), str(request.path))
        assert f"{request.node.name} PASSED" in outcome


@functools.cache
def outcome_in_a_namespace(root: str, file: str) -> str:
    """Run all of this where a user may mount, in another process, and return what it prints."""
    own = ["unshare", "--map-root-user", "--mount"]
    probe = [*own, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    refused = subprocess.run(probe, capture_output=True, text=True, check=False)
    if refused.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {refused.stderr}")
    tests = [sys.executable, "-m", "pytest", "-v", "-p", "vescale_testing.plugin", file]
    return subprocess.run(
        [*own, *tests], cwd=root, capture_output=True, text=True, check=False
    ).stdout
