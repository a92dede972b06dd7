"""A directory as storage; see [Note: committing]."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vescale_ckpt._format.manifest import MANIFEST_NAME, Manifest
from vescale_ckpt._io.sequential_writer import Create, created_in
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError

from .atomic_directory import (
    StagedDirectory,
    check_replaceable,
    check_visible,
    interrupted,
    is_there,
    place_of,
    read_manifest,
    remove_leftovers,
    staging_directory,
    sync_directory,
)
from .reader import CheckpointReader
from .storage import T
from .verify import wrong_headers

_TORCH_LOADER = "A file of torch.save: torch.load, and load_state_dict() of the model"
# What to call with a file that is no checkpoint of this format, by the end of its name.
_FILE_LOADERS = {
    ".safetensors": "A file of safetensors: vescale_ckpt.load_safetensors, import_safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _TORCH_LOADER),
}
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]+\.(saving|replaced|removed)")


class DirectoryStorage:
    """A directory that is a checkpoint, or in which checkpoints lie; it need not be there."""

    def __init__(self, path: Path) -> None:
        self.where = path

    @property
    def name(self) -> str:
        return self.where.name

    @property
    def is_link(self) -> bool:
        return self.where.is_symlink()

    def parent(self) -> DirectoryStorage:
        return DirectoryStorage(self.where.parent)

    def child(self, name: str) -> DirectoryStorage:
        return DirectoryStorage(self.where / name)

    def open(self) -> CheckpointReader:
        """Open the checkpoint, or the one that was being replaced here."""
        where = place_of(self.where)
        if not is_there(where):
            raise CheckpointError(
                f"there is no checkpoint at {self.where}: no such directory. A first run has "
                "nothing to load: vescale_ckpt.latest(directory) returns the newest of the "
                "checkpoints in a directory (step-100, step-200, ..), None if there is none"
            )
        if not where.is_dir():
            raise CheckpointError(
                f"there is no checkpoint at {self.where}: expected a directory, got a file. "
                f"{_FILE_LOADERS.get(where.suffix, '')}".rstrip()
            )
        if not is_there(where / MANIFEST_NAME):
            raise CorruptCheckpointError(
                f"there is no checkpoint at {self.where}: {MANIFEST_NAME}, the file written "
                "last, is missing; the save did not finish, or this is another kind of directory. "
                f"{_other_loader(where)}"
            )
        return CheckpointReader(where)

    def read_manifest(self) -> Manifest:
        return read_manifest(self.where)

    def defect(self) -> str | None:
        """Return why this is no whole checkpoint, None if it is one."""
        path = place_of(self.where)
        try:
            with CheckpointReader(path, most_open=1) as reader:
                return next(wrong_headers(reader), None)
        except FileNotFoundError:
            return ""  # just deleted by another job
        except CorruptCheckpointError as error:
            if is_there(path / MANIFEST_NAME) or any(path.glob("*.safetensors")):
                return str(error)
            return ""

    def check_replaceable(self) -> None:
        check_replaceable(self.where)

    def staging_directory(self, token: str) -> Path:
        return staging_directory(self.where, token)

    def stage(self, token: str) -> StagedDirectory:
        return StagedDirectory(self.where, token)

    def write(self, token: str, action: Callable[[Create], T]) -> T:
        directory = self.staging_directory(token)
        check_visible(directory)
        return action(created_in(directory))

    def discard(self, name: str) -> None:
        """Do nothing: the directory goes as a whole."""

    def names(self) -> list[str]:
        """Return the names of directories, and of those that were just being replaced."""
        try:
            with os.scandir(self.where) as entries:
                directories = {entry.name: entry.is_dir() for entry in entries}
        except FileNotFoundError:
            return []
        hidden = {found[1] for name in directories if (found := _HIDDEN.fullmatch(name))}
        visible = {name for name in directories if not name.startswith(".")}
        return [
            name
            for name in visible | hidden
            if directories.get(name) or interrupted(self.where / name) is not None
        ]

    def remove(self, names: Sequence[str]) -> None:
        """Hide checkpoints, each in one step, so that nobody finds a part of one."""
        for name in names:
            path = self.where / name
            hidden = self.where / f".{name}.{uuid.uuid4().hex}.removed"
            # Perhaps another job was faster.
            with suppress(FileNotFoundError):
                os.rename(place_of(path), hidden)
        if names:
            sync_directory(self.where)

    def remove_leftovers(self, older: Sequence[str]) -> None:
        """Delete what is hidden, but for what a live writer holds a lock on."""
        del older  # locks tell more than numbers
        for name in os.listdir(self.where) if self.where.exists() else ():
            if found := _HIDDEN.fullmatch(name):
                if found[2] == "removed":
                    shutil.rmtree(self.where / name, ignore_errors=True)
                else:
                    remove_leftovers(self.where / found[1])


def _other_loader(where: Path) -> str:
    """Return what to call with a directory that is no checkpoint of this format."""
    if (where / ".metadata").exists():
        return "A checkpoint of torch.distributed.checkpoint: vescale_ckpt.load_dcp, import_dcp"
    if any(where.glob("*.safetensors")):
        return "A HuggingFace model: vescale_ckpt.load_safetensors, import_safetensors"
    return "Of a directory of checkpoints load one: vescale_ckpt.latest(directory)"
