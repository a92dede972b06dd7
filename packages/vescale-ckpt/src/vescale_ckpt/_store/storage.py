"""Storage: the one interface to directories and object stores that hold checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from vescale_ckpt._format.manifest import Manifest

from .reader import CheckpointReader

T = TypeVar("T")

Create = Callable[[str], AbstractContextManager[BinaryIO]]


class StagedCheckpoint(Protocol):
    """A checkpoint that is being written; see [Note: committing] and [Note: object stores]."""

    def commit(self, manifest: Manifest) -> None:
        """Make it the checkpoint, in one step, once all of its files are written."""
        ...

    def close(self) -> None:
        """Give up what was not committed."""
        ...


class Storage(Protocol):
    """A place that is a checkpoint, or is to be one, or in which checkpoints lie.

    Attributes:
        name: The last part of its path or URL.
        where: Its path or URL, as users get it.
        is_link: Whether it is a link to somewhere else.
    """

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> Path | str: ...

    @property
    def is_link(self) -> bool: ...

    def parent(self) -> Storage:
        """Return the place that this one lies in."""
        ...

    def child(self, name: str) -> Storage:
        """Return a place within this one."""
        ...

    def open(self) -> CheckpointReader:
        """Open the committed checkpoint that this is."""
        ...

    def read_manifest(self) -> Manifest:
        """Return the manifest, whatever the other files are like."""
        ...

    def defect(self) -> str | None:
        """Return why this is no whole checkpoint; see [Note: whole].

        Returns:
            None if it is whole, nothing if none was ever committed here, or what is damaged.

        Raises:
            OSError: For all that says nothing about the checkpoint itself.
            CheckpointError: If it is of a newer format.
        """
        ...

    def check_replaceable(self) -> None:
        """Refuse to have something replaced that is no checkpoint."""
        ...

    def staging_directory(self, token: str) -> Path | None:
        """Return where all ranks of a save may write to the same files, None if nowhere."""
        ...

    def stage(self, token: str) -> StagedCheckpoint:
        """Begin to write a checkpoint. One rank must call this, before the others write.

        Args:
            token: The name of this save.
        """
        ...

    def write(self, token: str, action: Callable[[Create], T]) -> T:
        """Call ``action`` with what creates files of the staged checkpoint; perhaps again."""
        ...

    def discard(self, name: str) -> None:
        """Delete a file of a save that has failed, unless :meth:`StagedCheckpoint.close` does."""
        ...

    def names(self) -> Iterable[str]:
        """Return the names of what could be checkpoints in here."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Delete checkpoints in here, so that each is whole or none at every moment."""
        ...

    def remove_leftovers(self, older: Sequence[str]) -> None:
        """Delete what dead writers have left in here.

        Args:
            older: The names of the series before its last whole checkpoint.
        """
        ...
