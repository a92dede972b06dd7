"""What ``latest`` finds out about a checkpoint, and what it says if it cannot."""

from __future__ import annotations

import errno
import json
import os
import resource
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._load import match as match_module

NUM_FILES = 150


def write(directory: Path, *numbers: int) -> None:
    for number in numbers:
        state = {"model": {"w": torch.full((3,), number)}, "step": number}
        vescale_ckpt.save(directory / f"step-{number}", state)


@contextmanager
def most_open_files(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_checkpoint_of_more_files_than_may_be_open_is_saved_found_and_loaded(
    tmp_path: Path,
) -> None:
    state = {f"group{i}": {"w": torch.full((3,), i)} for i in range(NUM_FILES)}
    target = {key: {"w": torch.zeros_like(value["w"])} for key, value in state.items()}
    vescale_ckpt.save(tmp_path / "step-1", state)
    used = len(os.listdir("/proc/self/fd"))
    with most_open_files(used + 60):
        vescale_ckpt.save(tmp_path / "step-2", state)
        assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-2"
        vescale_ckpt.load(tmp_path / "step-2", target)
        vescale_ckpt.load(tmp_path / "step-2", target, verify_first=True)
    assert all(torch.equal(target[key]["w"], state[key]["w"]) for key in state)
    assert len(os.listdir("/proc/self/fd")) == used


def test_a_file_replaced_while_many_are_read_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"group{i}": {"w": torch.full((3,), i)} for i in range(4)}
    vescale_ckpt.save(tmp_path / "a", state)
    monkeypatch.setattr("vescale_ckpt._io.file_handles._spare_handles", lambda: 1)
    original = match_module.match

    def replacing(*args: Any, **kwargs: Any) -> Any:
        vescale_ckpt.save(tmp_path / "a", state)
        return original(*args, **kwargs)

    monkeypatch.setattr("vescale_ckpt._load.load.match", replacing)
    with pytest.raises(CheckpointError, match=r"group\d.safetensors was replaced or deleted"):
        vescale_ckpt.load(tmp_path / "a", state)


@pytest.mark.parametrize("number", ["EMFILE", "ENFILE", "EACCES", "EIO", "ESTALE"])
@pytest.mark.parametrize("function", ["open", "stat"])
def test_an_error_that_says_nothing_about_the_checkpoint_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, function: str
) -> None:
    write(tmp_path, 1, 2)
    original = getattr(os, function)
    newest = os.stat(tmp_path / "step-2").st_ino

    def failing(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        within = dir_fd is not None and os.fstat(dir_fd).st_ino == newest
        if within or str(path).endswith("step-2"):
            code = getattr(errno, number)
            raise OSError(code, os.strerror(code), path)
        return original(path, *args, dir_fd=dir_fd, **kwargs)

    monkeypatch.setattr(os, function, failing)
    for look in (
        vescale_ckpt.latest,
        vescale_ckpt.list_checkpoints,
        lambda path: vescale_ckpt.remove_older(path, keep_last=1),
        lambda path: vescale_ckpt.remove_older(path, keep_last=1, thorough=True),
        lambda path: vescale_ckpt.latest(path, thorough=True),
    ):
        with pytest.raises(OSError, match=r"step-2|model.safetensors|vescale.json") as caught:
            look(tmp_path)
        assert caught.value.errno == getattr(errno, number)
    monkeypatch.undo()
    assert len(vescale_ckpt.list_checkpoints(tmp_path)) == 2


def truncated(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", 100)


def missing(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


def without_record(checkpoint: Path) -> None:
    (checkpoint / "vescale.json").unlink()


def damaged_record(checkpoint: Path) -> None:
    file = checkpoint / "vescale.json"
    file.write_bytes(file.read_bytes().replace(b'"step":2', b'"step":3'))


def damaged_header(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"w"', b'"v"', 1))


def cleared(checkpoint: Path) -> None:
    """As after a crash of a file system that had written the length, but not the content."""
    file = checkpoint / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))


def a_pipe(checkpoint: Path) -> None:
    missing(checkpoint)
    os.mkfifo(checkpoint / "model.safetensors")


def a_record_that_is_a_pipe(checkpoint: Path) -> None:
    without_record(checkpoint)
    os.mkfifo(checkpoint / "vescale.json")


def a_link(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.rename(checkpoint.parent / "elsewhere")
    file.symlink_to(checkpoint.parent / "elsewhere")


DAMAGES = [
    truncated, missing, without_record, damaged_record, damaged_header, cleared, a_pipe,
    a_record_that_is_a_pipe, a_link,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_with_a_warning_that_names_the_file(
    tmp_path: Path, damage: Any
) -> None:
    write(tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    with pytest.warns(UserWarning, match=r"passed over .*step-2.*(safetensors|vescale.json)"):
        assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-1"
    with pytest.warns(UserWarning, match="passed over") as caught:
        assert vescale_ckpt.list_checkpoints(tmp_path) == [tmp_path / "step-1"]
    assert len(caught) == 1
    with pytest.raises(CheckpointError):
        vescale_ckpt.load(tmp_path / "step-2", {"model": None, "step": 0})


def test_bytes_of_tensors_are_read_if_asked_for(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    with open(tmp_path / "step-2" / "model.safetensors", "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\xff")
    assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-2"
    with pytest.warns(UserWarning, match=r"step-2/model.safetensors: bytes .* tensors 'model.w'"):
        assert vescale_ckpt.latest(tmp_path, thorough=True) == tmp_path / "step-1"


def test_what_never_was_a_checkpoint_is_passed_over_without_a_word(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "notes.txt").write_text("not ours")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-1"


def test_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    file = tmp_path / "step-2" / "vescale.json"
    text = file.read_bytes().replace(b'"vescale_ckpt":2', b'"vescale_ckpt":3')
    start = text.index(b'"crc32":"') + 9
    blank = text[:start] + b"00000000" + text[start + 8 :]
    file.write_bytes(blank[:start] + b"%08x" % crc32(blank) + blank[start + 8 :])
    with pytest.raises(CheckpointError, match=r"format version 3.*upgrade"):
        vescale_ckpt.latest(tmp_path)


def test_a_link_to_a_checkpoint_counts_and_is_not_deleted(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    write(tmp_path / "disk", 1)
    write(runs, 2, 3)
    (runs / "step-1").symlink_to(tmp_path / "disk" / "step-1")
    assert vescale_ckpt.list_checkpoints(runs)[0] == runs / "step-1"
    assert vescale_ckpt.remove_older(runs, keep_last=1) == [runs / "step-2"]
    loaded = vescale_ckpt.load(
        runs / "step-1", {"model": {"w": torch.zeros(3, dtype=torch.int64)}, "step": 0}
    )
    assert loaded["step"] == 1
    with pytest.raises(CheckpointError, match=r"step-1 is a symbolic link to .*disk/step-1"):
        write(runs, 1)


def test_headers_are_those_of_the_record(tmp_path: Path) -> None:
    write(tmp_path, 1)
    file = tmp_path / "step-1" / "model.safetensors"
    content = file.read_bytes()
    (nbytes,) = struct.unpack("<Q", content[:8])
    assert json.loads(content[8 : 8 + nbytes])["w"]["data_offsets"] == [0, 24]


def test_a_save_that_cannot_look_at_older_ones_says_that_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def fails(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", "step-1")

    with monkeypatch.context() as patch:
        patch.setattr("vescale_ckpt._store.directory_storage.DirectoryStorage.defect", fails)
        with pytest.raises(CheckpointError, match=r"step-2 is committed, but .*output error"):
            vescale_ckpt.save(tmp_path / "step-2", {"x": 2}, keep_last=1)
    assert vescale_ckpt.latest(tmp_path) == tmp_path / "step-2"
    assert vescale_ckpt.load(tmp_path / "step-2", {"x": 0}) == {"x": 2}
