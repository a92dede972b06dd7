"""Where people save to: links, mounts, pipes, paths of all kinds, file systems without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._store import atomic_directory
from vescale_testing import World


def test_a_pipe_beside_the_tensors_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"x": 1})
    (tmp_path / "ckpt" / "logs").mkdir()
    os.mkfifo(tmp_path / "ckpt" / "logs" / "pipe")
    with pytest.raises(CheckpointError, match=r"logs/pipe is a named pipe, which a save"):
        vescale_ckpt.save(tmp_path / "ckpt", {"x": 2})
    assert vescale_ckpt.load(tmp_path / "ckpt", {"x": 0}) == {"x": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"run holds files but no checkpoint"):
        vescale_ckpt.save(tmp_path / "run", {"x": 1})
    vescale_ckpt.save(tmp_path / "run" / "step-1", {"x": 1})


def test_a_mount_point_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    with pytest.raises(CheckpointError, match=r"volume is a mount point.*volume/step-1"):
        vescale_ckpt.save(tmp_path / "volume", {"x": 1})
    vescale_ckpt.save(tmp_path / "volume" / "step-1", {"x": 1})


@pytest.mark.parametrize("path", [".", ""])
def test_the_working_directory_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run is the working directory.*run/step-1"):
        vescale_ckpt.save(path, {"x": 1})
    vescale_ckpt.save("step-1", {"x": 1})
    assert (tmp_path / "run" / "step-1").is_dir()


@pytest.mark.parametrize("kind", ["relative", "slash", "dots", "pathlike", "unicode", "long"])
def test_a_path_of_any_kind_is_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Like:
        def __fspath__(self) -> str:
            return str(tmp_path / "c")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    paths: dict[str, Any] = {
        "relative": "c",
        "slash": f"{tmp_path}/c///",
        "dots": f"{tmp_path}/other/../c",
        "pathlike": Like(),
        "unicode": "c \u00fc\U0001f600 '\"\n$(x)",
        "long": "c" * 200,
    }
    path = paths[kind]
    vescale_ckpt.save(path, {"w": torch.ones(2)})
    vescale_ckpt.save(path, {"w": torch.full((2,), 2.0)})
    assert vescale_ckpt.load(path, {"w": torch.zeros(2)})["w"].tolist() == [2, 2]
    assert len([entry for entry in os.listdir(tmp_path) if entry.startswith("c")]) == 1
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(path, {"w": torch.full((2,), 3.0)})
        monkeypatch.chdir(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert vescale_ckpt.load(path, {"w": torch.zeros(2)})["w"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("file", "loader"),
    [(".metadata", "load_dcp"), ("model.safetensors", "load_safetensors"), ("x", "latest")],
)
def test_a_directory_of_another_format_is_refused_with_what_loads_it(
    tmp_path: Path, file: str, loader: str
) -> None:
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=f"vescale.json.*missing.*vescale_ckpt.{loader}"):
        vescale_ckpt.load(tmp_path, {"w": torch.zeros(2)})


def test_a_tilde_is_the_home_of_whoever_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    state = {"model": {"w": torch.ones(2)}}
    vescale_ckpt.save("~/run/step-1", state)
    vescale_ckpt.load(Path("~/run/step-1"), state)
    vescale_ckpt.export_safetensors("~/run/step-1", "~/hf")
    vescale_ckpt.import_safetensors("~/hf", "~/run/step-2")
    vescale_ckpt.save_safetensors("~/saved", {"w": torch.ones(2)})
    vescale_ckpt.export_dcp("~/run/step-2", "~/dcp")
    vescale_ckpt.import_dcp("~/dcp", Path("~/run/step-3"))
    assert vescale_ckpt.latest("~/run") == home / "run" / "step-3"
    assert sorted(entry.name for entry in home.iterdir()) == ["dcp", "hf", "run", "saved"]
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("path", [Path("s3://bucket/step-1"), "s3:/bucket/step-1", "gs:/b"])
def test_a_url_that_has_become_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: vescale_ckpt.save(path, {"x": 1}),
        lambda: vescale_ckpt.load(path, {"x": 1}),
        lambda: vescale_ckpt.latest(path),
    ):
        with pytest.raises(ValueError, match=r"looks like a URL.*pass it as a string"):
            act()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_may_not_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"Permission denied: '.*\.ckpt\..*saving'"):
        vescale_ckpt.save(tmp_path / "ckpt", {"x": 1})


def test_a_manifest_that_may_not_be_read_is_named_with_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vescale_ckpt.save(tmp_path / "ckpt", {"x": 1})
    ordinary = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("vescale.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return ordinary(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"Permission denied: '.*/ckpt/vescale\.json'"):
        vescale_ckpt.load(tmp_path / "ckpt", {"x": 0})


def failing_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_leftovers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / ".ckpt.00.saving").mkdir()
    failing_flock(monkeypatch, number)
    with pytest.warns(UserWarning, match=r"cannot lock directories .*delete it when no job"):
        vescale_ckpt.save(tmp_path / "ckpt", {"x": 1})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".ckpt.00.saving", "ckpt"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(3):
            vescale_ckpt.save(tmp_path / f"other-{number}", {"x": 1})
    assert len(caught) == 1


def test_a_lock_that_fails_for_another_reason_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_flock(monkeypatch, errno.EIO)
    with pytest.raises(CheckpointError, match="Input/output error"):
        vescale_ckpt.save(tmp_path / "ckpt", {"x": 1})


def test_a_directory_that_another_saver_takes_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, held = fcntl.flock, list[int]()

    def flock(descriptor: int, operation: int) -> None:
        if not held:  # the other one was faster, and deletes
            held.append(os.dup(descriptor))
            raise BlockingIOError(errno.EWOULDBLOCK, "taken")
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    staging = atomic_directory.StagedDirectory(tmp_path / "ckpt", "aa")
    assert len(held) == 1
    staging.close()
    os.close(held[0])


@pytest.mark.parametrize(
    ("name", "loader"),
    [("m.safetensors", "load_safetensors"), ("m.pt", "torch.load"), ("m.bin", "torch.load")],
)
def test_a_file_of_another_format_is_refused_with_what_loads_it(
    tmp_path: Path, name: str, loader: str
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"expected a directory, got a file.*{loader}"):
        vescale_ckpt.load(tmp_path / name, {"w": torch.zeros(2)})


def save_from_another_directory(tmp_path: Path, layout: Any) -> str:
    (tmp_path / str(dist.get_rank())).mkdir()
    here = Path.cwd()
    os.chdir(tmp_path / str(dist.get_rank()))
    try:
        with pytest.raises(CheckpointError) as raised:
            vescale_ckpt.save("step-1", {"w": torch.ones(2)}, layout=layout)
    finally:
        os.chdir(here)
    return str(raised.value)


@pytest.mark.parametrize("layout", ["shared", "per_rank"])
def test_a_place_that_ranks_do_not_share_is_named(
    world2: World, tmp_path: Path, layout: str
) -> None:
    for message in world2.run(save_from_another_directory, tmp_path, layout):
        assert "made by rank 0, is not visible here; save to a path on a file" in message
    assert [*tmp_path.glob("*/*"), *tmp_path.glob("*/.*")] == []


def messages_of_several_paths(tmp_path: Path, layout: Any) -> list[str]:
    rank = dist.get_rank()
    for number in range(2):
        vescale_ckpt.save(tmp_path / f"step-{number}", {"w": torch.full((2,), float(number))})
    messages: list[str] = []
    calls: list[Any] = [
        lambda: vescale_ckpt.save(tmp_path / f"at-{rank}", {"w": torch.ones(2)}, layout=layout),
        lambda: vescale_ckpt.load(tmp_path / f"step-{rank}", {"w": torch.ones(2)}),
    ]
    for call in calls:
        with pytest.raises(CheckpointError) as raised:
            call()
        messages.append(str(raised.value))
    return messages


@pytest.mark.parametrize("layout", ["shared", "per_rank"])
def test_paths_that_differ_between_ranks_are_named(
    world2: World, tmp_path: Path, layout: str
) -> None:
    for saved, loaded in world2.run(messages_of_several_paths, tmp_path, layout):
        assert "same last part of the path on every rank, got" in saved
        assert "'at-0' on rank 0; 'at-1' on rank 1" in saved
        assert f"{tmp_path}/step-0 on rank 0; {tmp_path}/step-1 on rank 1: have one" in loaded
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-1"]
