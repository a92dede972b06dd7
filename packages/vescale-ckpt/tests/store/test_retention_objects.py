"""Which checkpoint of an object store is the latest, and which may be deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import vescale_ckpt
from vescale_ckpt import CheckpointError, cli
from vescale_ckpt._save import rank_files
from vescale_ckpt._store.open import storage_at
from vescale_ckpt._store.retention import keep_newest
from vescale_testing import World

MANIFEST = "vescale.json"
LEFTOVER = "rank-00003-0123456789abcdef.safetensors"


def write(root: str, *numbers: int, prefix: str = "step-") -> None:
    for number in numbers:
        vescale_ckpt.save(f"{root}/{prefix}{number}", {"w": torch.full((3,), number)})


def files(url: str) -> list[str]:
    """Return the names of all files below a URL, as the file system itself tells."""
    system, path = fsspec.url_to_fs(url)
    system.invalidate_cache()
    return sorted(name.split(path.strip("/") + "/", 1)[1] for name in system.find(path))


def put(url: str, content: bytes = b"something") -> None:
    system, path = fsspec.url_to_fs(url)
    system.pipe_file(path, content)


def content(url: str) -> bytes:
    system, path = fsspec.url_to_fs(url)
    return system.cat_file(path)


def delete(url: str) -> None:
    system, path = fsspec.url_to_fs(url)
    system.rm_file(path)


def tensors_of(url: str) -> str:
    return next(f"{url}/{name}" for name in files(url) if name.startswith("rank-"))


def number_at(url: Any) -> int:
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    vescale_ckpt.load(url, state)
    return int(state["w"][0])


def truncated(url: str) -> None:
    put(tensors_of(url), content(tensors_of(url))[:-1])


def flipped(url: str) -> None:
    whole = content(tensors_of(url))
    put(tensors_of(url), whole[:-1] + bytes([whole[-1] ^ 1]))


def without_tensors(url: str) -> None:
    delete(tensors_of(url))


def uncommitted(url: str) -> None:
    delete(f"{url}/{MANIFEST}")


def garbled(url: str) -> None:
    put(f"{url}/{MANIFEST}", b"{}")


def the_latest_has_the_highest_number(root: str) -> None:
    assert vescale_ckpt.latest(root) is None
    assert vescale_ckpt.list_checkpoints(root) == []
    write(root, 20, 100, 9)
    put(f"{root}/step-200/config.json")
    put(f"{root}/step-300", b"a file")
    write(root, 10, 1)  # names that are the beginnings of others
    assert vescale_ckpt.latest(f"{root}/") == f"{root}/step-100"
    assert number_at(vescale_ckpt.latest(root)) == 100
    names = ["step-1", "step-9", "step-10", "step-20", "step-100"]
    assert vescale_ckpt.list_checkpoints(root) == [f"{root}/{name}" for name in names]


def what_is_not_whole_neither_counts_nor_goes(root: str) -> None:
    damages = [truncated, without_tensors, uncommitted, garbled]
    write(root, *range(3 + len(damages)))
    for number, damage in enumerate(damages, start=3):
        damage(f"{root}/step-{number}")
    before = [name for name in files(root) if name >= "step-2"]
    with pytest.warns(
        UserWarning, match="passed over the checkpoint .*step-[346], which is damaged"
    ):
        assert vescale_ckpt.latest(root) == f"{root}/step-2"
    with pytest.warns(
        UserWarning, match="passed over the checkpoint .*step-[346], which is damaged"
    ):
        removed = vescale_ckpt.remove_older(root, keep_last=1)
    assert removed == [f"{root}/step-0", f"{root}/step-1"]
    assert files(root) == before


def names_that_begin_differently_are_told_apart(root: str) -> None:
    write(root, 1, 2)
    write(root, 7, prefix="epoch-")
    with pytest.raises(CheckpointError, match="begin with 'epoch-', 'step-'"):
        vescale_ckpt.latest(root)
    assert vescale_ckpt.latest(root, prefix="epoch-") == f"{root}/epoch-7"
    assert vescale_ckpt.latest(root, prefix="none") is None
    keep_newest(storage_at(f"{root}/step-2"), 1)
    assert {name.split("/")[0] for name in files(root)} == {"epoch-7", "step-2"}


def what_goes_goes_with_all_its_files(root: str) -> None:
    write(root, 1, 2, 10)
    put(f"{root}/step-1/config.json")
    put(f"{root}/step-1/tokenizer/vocab.txt")
    before = files(root)
    expected = [f"{root}/step-1", f"{root}/step-2"]
    assert vescale_ckpt.remove_older(root, keep_last=1, dry_run=True) == expected
    assert files(root) == before
    assert cli.main(["gc", root, "--keep", "1"]) == 0
    assert vescale_ckpt.list_checkpoints(root) == [f"{root}/step-10"]
    assert files(root) == [name for name in before if name.startswith("step-10/")]


def what_dead_writers_have_left_goes_below_the_last_whole_one(root: str) -> None:
    write(root, 1, 2, 3)
    uncommitted(f"{root}/step-1")
    garbled(f"{root}/step-2")
    write(root, 4)
    before = files(root)
    for number in (0, 1, 2, 3, 4, 5):
        put(f"{root}/step-{number}/{LEFTOVER}")
    put(f"{root}/step-1/notes.txt")
    with pytest.warns(UserWarning, match="passed over the checkpoint .*step-2, which is damaged"):
        assert vescale_ckpt.remove_older(root, keep_last=5) == []
    # What a manifest that cannot be read names is not known; step-5 may be on its way.
    kept = [f"step-{number}/{LEFTOVER}" for number in (2, 4, 5)]
    gone = [name for name in before if name.startswith("step-1/")]
    expected = {*before, *kept, "step-1/notes.txt"} - set(gone)
    assert files(root) == sorted(expected)
    assert number_at(f"{root}/step-3") == 3
    assert number_at(f"{root}/step-4") == 4


def only_sound_ones_are_kept_if_every_byte_is_read(root: str) -> None:
    write(root, 1, 2, 3)
    flipped(f"{root}/step-3")
    flipped(f"{root}/step-2")
    with pytest.warns(UserWarning, match="passed over the checkpoint .*do not match"):
        assert vescale_ckpt.remove_older(root, keep_last=1, thorough=True) == []
    assert vescale_ckpt.list_checkpoints(root)[0] == f"{root}/step-1"


def a_save_never_deletes_itself(root: str) -> None:
    write(root, 100, 200, 300, 50)
    keep_newest(storage_at(f"{root}/step-50"), 2)
    assert vescale_ckpt.list_checkpoints(root) == [f"{root}/step-50", f"{root}/step-300"]


def a_save_keeps_the_last_of_its_kind(root: str) -> None:
    write(root, 1, prefix="epoch-")
    for number in range(1, 5):
        vescale_ckpt.save(f"{root}/step-{number}", {"n": number}, keep_last=2)
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(f"{root}/step-5", {"n": 5}, keep_last=2)
    assert {name.split("/")[0] for name in files(root)} == {"epoch-1", "step-4", "step-5"}
    assert vescale_ckpt.load(f"{root}/step-5", {"n": 0}) == {"n": 5}


# These depend on what a store lists, and how.
STORIES_OF_LISTINGS: list[Callable[[str], None]] = [
    the_latest_has_the_highest_number,
    what_goes_goes_with_all_its_files,
    what_dead_writers_have_left_goes_below_the_last_whole_one,
]
STORIES: list[Callable[[str], None]] = [
    *STORIES_OF_LISTINGS,
    a_save_keeps_the_last_of_its_kind,
    what_is_not_whole_neither_counts_nor_goes,
    names_that_begin_differently_are_told_apart,
    only_sound_ones_are_kept_if_every_byte_is_read,
    a_save_never_deletes_itself,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_in_memory(memory_bucket: str, story: Callable[[str], None]) -> None:
    story(memory_bucket)


def on_s3(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for story in STORIES_OF_LISTINGS:
        bucket = story.__name__.replace("_", "-")[:60].rstrip("-")
        system, _ = fsspec.url_to_fs(f"s3://{bucket}")
        system.makedirs(bucket, exist_ok=True)
        story(f"s3://{bucket}/runs/a")


def test_on_s3(world1: World, s3: dict[str, str]) -> None:
    world1.run(on_s3, s3)


def test_the_top_of_a_file_system_is_a_place_as_well(memory_bucket: str) -> None:
    del memory_bucket
    write("memory:/", 1, 2)
    assert vescale_ckpt.latest("memory://") == "memory://step-2"
    keep_newest(storage_at("memory://step-2"), 1)
    assert vescale_ckpt.list_checkpoints("memory://") == ["memory://step-2"]


def test_a_place_that_cannot_be_reached_is_no_reason_to_take_an_older_checkpoint(
    memory_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(memory_bucket, 1, 2)
    original = MemoryFileSystem.cat_file

    def fails(system: MemoryFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
        if "step-2" in path:
            raise ConnectionError("reset by peer")
        return original(system, path, *args, **kwargs)

    monkeypatch.setattr("vescale_ckpt._io.object_store._DELAYS_SECONDS", (0,))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", fails)
    with pytest.raises(ConnectionError):
        vescale_ckpt.latest(memory_bucket)
    with pytest.raises(ConnectionError):
        vescale_ckpt.remove_older(memory_bucket, keep_last=1)
    monkeypatch.undo()
    assert len(vescale_ckpt.list_checkpoints(memory_bucket)) == 2


class _DiedError(BaseException):
    """Stands for the end of the process."""


def dies_after(monkeypatch: pytest.MonkeyPatch, effects: int) -> None:
    """Let every change after so many end the process instead."""
    remaining = [effects]
    for method in ("rm_file", "pipe_file", "rmdir"):
        original = getattr(MemoryFileSystem, method)

        def hooked(*args: Any, _do: Callable[..., Any] = original, **kwargs: Any) -> Any:
            if remaining[0] <= 0:
                raise _DiedError
            remaining[0] -= 1
            return _do(*args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, method, hooked)


@pytest.mark.parametrize("effects", range(9))
def test_a_deletion_that_dies_leaves_whole_checkpoints_only(
    memory_bucket: str, monkeypatch: pytest.MonkeyPatch, effects: int
) -> None:
    write(memory_bucket, 1, 2, 3, 4)
    put(f"{memory_bucket}/step-1/config.json")
    dies_after(monkeypatch, effects)
    try:
        vescale_ckpt.remove_older(memory_bucket, keep_last=2)
    except _DiedError:
        pass
    else:
        assert effects == 8, "there are fewer moments to die in than this test thinks"
    monkeypatch.undo()
    found = vescale_ckpt.list_checkpoints(memory_bucket)
    assert [number_at(url) for url in found] == [1, 2, 3, 4][-len(found) :]
    assert len(found) >= 2
    vescale_ckpt.remove_older(memory_bucket, keep_last=2)
    left = files(memory_bucket)
    assert [name for name in left if "config" not in name and name < "step-3"] == []


def test_a_save_whose_files_were_deleted_meanwhile_commits_nothing(
    memory_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(memory_bucket, 1, 9)
    original = rank_files._manifest

    def deletes(*args: Any) -> Any:
        vescale_ckpt.remove_older(memory_bucket, keep_last=2)
        return original(*args)

    monkeypatch.setattr(rank_files, "_manifest", deletes)
    with pytest.raises(CheckpointError, match="is another job deleting"):
        vescale_ckpt.save(f"{memory_bucket}/step-1", {"w": torch.zeros(3)})
    monkeypatch.undo()
    assert number_at(f"{memory_bucket}/step-1") == 1
