"""Numbered checkpoints in a directory; see _series.py."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ._commit import interrupted, remove_leftovers, sync_directory
from ._read import Reader
from ._verify import verify
from .exceptions import CheckpointError

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
            names = os.listdir(self._root)
        except FileNotFoundError:
            return []
        hidden = {found[1] for name in names if (found := _HIDDEN.fullmatch(name))}
        visible = {name for name in names if not name.startswith(".")}
        return [
            name
            for name in visible | hidden
            if (self._root / name).is_dir() or interrupted(self._root / name) is not None
        ]

    def where(self, name: str) -> Path:
        """Return the path of a checkpoint."""
        return self._root / name

    def is_whole(self, name: str) -> bool:
        """Return whether a checkpoint's record is sound and its files have their lengths."""
        path = self._root / name
        try:
            Reader(interrupted(path) or path).close()
        except (OSError, CheckpointError):
            return False
        return True

    def is_sound(self, name: str) -> bool:
        """Return whether every byte of a checkpoint is as it was saved."""
        path = self._root / name
        return not verify(interrupted(path) or path)

    def remove(self, names: Sequence[str]) -> None:
        """Hide checkpoints, each in one step, so that nobody finds a part of one."""
        for name in names:
            path = self._root / name
            hidden = self._root / f".{name}.{uuid.uuid4().hex}.removed"
            # Perhaps another job was faster.
            with suppress(FileNotFoundError):
                os.rename(interrupted(path) or path, hidden)
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
