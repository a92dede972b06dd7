"""Numbered checkpoints in a directory; see retention.py."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vescale_ckpt._format.manifest import MANIFEST_NAME
from vescale_ckpt.exceptions import CorruptCheckpointError

from .atomic_directory import interrupted, is_there, place_of, remove_leftovers, sync_directory
from .reader import CheckpointReader
from .verify import complaints_about, wrong_headers

_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]+\.(saving|replaced|removed)")


class DirectorySeries:
    """The checkpoints in a directory.

    Args:
        root: The directory; it need not be there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> list[str]:
        """Return the names of directories, and of those that were just being replaced."""
        try:
            with os.scandir(self._root) as entries:
                directories = {entry.name: entry.is_dir() for entry in entries}
        except FileNotFoundError:
            return []
        hidden = {found[1] for name in directories if (found := _HIDDEN.fullmatch(name))}
        visible = {name for name in directories if not name.startswith(".")}
        return [
            name
            for name in visible | hidden
            if directories.get(name) or interrupted(self._root / name) is not None
        ]

    def where(self, name: str) -> Path:
        """Return the path of a checkpoint."""
        return self._root / name

    def defect(self, name: str) -> str | None:
        """Return why this is no whole checkpoint, None if it is one; see retention.py."""
        path = place_of(self._root / name)
        try:
            with CheckpointReader(path, most_open=1) as reader:
                return next(wrong_headers(reader), None)
        except FileNotFoundError:
            return ""  # just deleted by another job
        except CorruptCheckpointError as error:
            if is_there(path / MANIFEST_NAME) or any(path.glob("*.safetensors")):
                return str(error)
            return ""

    def defect_of_bytes(self, name: str) -> str | None:
        """Return why not every byte of a checkpoint is as it was saved, None if all are."""
        return next(iter(complaints_about(place_of(self._root / name))), None)

    def is_ours(self, name: str) -> bool:
        """Return whether a checkpoint lies here, rather than a link to it."""
        return not (self._root / name).is_symlink()

    def remove(self, names: Sequence[str]) -> None:
        """Hide checkpoints, each in one step, so that nobody finds a part of one."""
        for name in names:
            path = self._root / name
            hidden = self._root / f".{name}.{uuid.uuid4().hex}.removed"
            # Perhaps another job was faster.
            with suppress(FileNotFoundError):
                os.rename(place_of(path), hidden)
        if names:
            sync_directory(self._root)

    def remove_leftovers(self, older: Sequence[str]) -> None:
        """Delete what is hidden, but for what a live writer holds a lock on."""
        del older  # locks tell more than numbers
        for name in os.listdir(self._root) if self._root.exists() else ():
            if found := _HIDDEN.fullmatch(name):
                if found[2] == "removed":
                    shutil.rmtree(self._root / name, ignore_errors=True)
                else:
                    remove_leftovers(self._root / found[1])
