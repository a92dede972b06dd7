"""Which checkpoint of a directory is the latest, and which may be deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._store import atomic_directory
from vescale_testing import World


def write(directory: Path, *numbers: int, prefix: str = "step-") -> None:
    for number in numbers:
        vescale_ckpt.save(directory / f"{prefix}{number}", {"w": torch.full((3,), number)})


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def truncated(checkpoint: Path) -> None:
    file = checkpoint / "tensors.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def flipped(checkpoint: Path) -> None:
    with open(checkpoint / "tensors.safetensors", "r+b") as stream:
        stream.seek(4096)
        stream.write(b"\xff")


def uncommitted(checkpoint: Path) -> None:
    (checkpoint / "vescale.json").unlink()


def test_the_latest_has_the_highest_number_whatever_the_clock_says(tmp_path: Path) -> None:
    write(tmp_path, 20, 9, 100)
    os.utime(tmp_path / "step-9", (2e9, 2e9))
    os.utime(tmp_path / "step-100", (0, 0))
    assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-100"
    found = vescale_ckpt.list_checkpoints(str(tmp_path))
    assert found == [tmp_path / name for name in ("step-9", "step-20", "step-100")]


def test_there_is_no_latest_in_an_empty_or_missing_directory(tmp_path: Path) -> None:
    assert vescale_ckpt.latest(tmp_path) is None
    assert vescale_ckpt.latest(tmp_path / "nowhere") is None
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-2").write_text("a file")
    assert vescale_ckpt.latest(tmp_path) is None


@pytest.mark.parametrize("damage", [truncated, uncommitted])
def test_the_latest_is_a_whole_one(tmp_path: Path, damage: Any) -> None:
    write(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-3")
    with pytest.warns(UserWarning, match=r"passed over .*step-3, which is damaged: .*step-3"):
        assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-2"
    shutil.rmtree(tmp_path / "step-3")
    assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-2"


def test_the_latest_may_have_been_on_its_way_to_be_replaced(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / "step-2").rename(tmp_path / ".step-2.0123.replaced")
    path = tmp_path / "step-2"
    assert vescale_ckpt.latest(tmp_path) == path
    given = {"w": torch.zeros(3, dtype=torch.int64)}
    vescale_ckpt.load(path, given)
    assert given["w"].tolist() == [2, 2, 2]
    assert vescale_ckpt.remove_older(tmp_path, keep_last=1) == [tmp_path / "step-1"]
    assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-2"


def test_names_that_begin_differently_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    write(tmp_path, 7, prefix="epoch-")
    write(tmp_path, 3, prefix="best")
    (tmp_path / "notes").mkdir()
    with pytest.raises(CheckpointError, match="begin with 'best', 'epoch-', 'step-'"):
        vescale_ckpt.latest(tmp_path)
    assert vescale_ckpt.latest(tmp_path, prefix="epoch-") == tmp_path / "epoch-7"
    assert vescale_ckpt.latest(tmp_path, prefix="none") is None


def test_a_save_keeps_the_last_of_its_kind(tmp_path: Path) -> None:
    write(tmp_path, 1, prefix="epoch-")
    for number in range(1, 6):
        vescale_ckpt.save(tmp_path / f"step-{number}", {"n": number}, keep_last=2)
    assert names(tmp_path) == ["epoch-1", "step-4", "step-5"]
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(tmp_path / "step-6", {"n": 6}, keep_last=1)
    assert names(tmp_path) == ["epoch-1", "step-6"]


def test_a_save_never_deletes_itself(tmp_path: Path) -> None:
    write(tmp_path, 100, 200, 300)
    vescale_ckpt.save(tmp_path / "step-50", {"n": 1}, keep_last=2)
    assert names(tmp_path) == ["step-300", "step-50"]


@pytest.mark.parametrize("damage", [truncated, uncommitted])
def test_what_is_not_whole_neither_counts_nor_goes(tmp_path: Path, damage: Any) -> None:
    write(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "step-4")
    with pytest.warns(UserWarning, match=r"passed over .*step-4, which is damaged") as caught:
        assert vescale_ckpt.remove_older(tmp_path, keep_last=1) == [
            tmp_path / "step-1",
            tmp_path / "step-2",
        ]
    assert len(caught) == 1
    assert names(tmp_path) == ["step-3", "step-4"]
    damage(tmp_path / "step-3")
    with pytest.warns(UserWarning, match=r"passed over .*step-[34], which is damaged"):
        assert vescale_ckpt.remove_older(tmp_path, keep_last=1) == []


def test_the_only_sound_one_survives_if_every_byte_is_read(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    flipped(tmp_path / "step-3")
    flipped(tmp_path / "step-2")
    with pytest.warns(
        UserWarning, match=r"passed over .*step-[23], .*do not match their checksum"
    ):
        assert vescale_ckpt.remove_older(tmp_path, keep_last=1, thorough=True) == []
    assert vescale_ckpt.remove_older(tmp_path, keep_last=1, dry_run=True) == [
        tmp_path / "step-1",
        tmp_path / "step-2",
    ]
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def test_what_dead_writers_have_left_goes_and_live_ones_stay(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    live = atomic_directory.StagedDirectory(tmp_path / "step-3", "aa")
    for name in (".step-2.bb.saving", ".step-1.cc.replaced", ".step-0.dd.removed", ".other"):
        (tmp_path / name).mkdir()
    vescale_ckpt.remove_older(tmp_path, keep_last=5)
    assert names(tmp_path) == [".other", ".step-3.aa.saving", "step-1", "step-2"]
    live.close()


def test_a_deletion_that_was_interrupted_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, 2)

    def dies(path: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        vescale_ckpt.remove_older(tmp_path, keep_last=1)
    monkeypatch.undo()
    assert vescale_ckpt.list_checkpoints(tmp_path) == [tmp_path / "step-2"]
    vescale_ckpt.save(tmp_path / "step-3", {"n": 3}, keep_last=2)
    assert names(tmp_path) == ["step-2", "step-3"]


@pytest.mark.parametrize(("name", "keep_last"), [("final", 1), ("step-1", 0), ("step-", 2)])
def test_a_save_that_cannot_tell_what_to_keep_is_refused(
    tmp_path: Path, name: str, keep_last: int
) -> None:
    with pytest.raises(ValueError, match=r"at least 1|ends with a number"):
        vescale_ckpt.save(tmp_path / name, {"n": 1}, keep_last=keep_last)
    with (
        vescale_ckpt.AsyncSaver() as saver,
        pytest.raises(ValueError, match=r"at least 1|ends with a number"),
    ):
        saver.save(tmp_path / name, {"n": 1}, keep_last=keep_last)
    assert names(tmp_path) == []


def save_three(directory: str) -> None:
    for number in range(3):
        vescale_ckpt.save(f"{directory}/{number}", {"n": number}, keep_last=1)
    dist.barrier()


def test_ranks_keep_the_last_together(world2: World, tmp_path: Path) -> None:
    world2.run(save_three, str(tmp_path))
    assert names(tmp_path) == ["2"]
