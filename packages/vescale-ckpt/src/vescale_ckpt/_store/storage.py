"""Storage: the one interface to directories and object stores that hold checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from vescale_ckpt._format.manifest import Manifest
from vescale_ckpt._io.sequential_writer import Create

from .reader import CheckpointReader

T = TypeVar("T")


class StagedCheckpoint(Protocol):
    """A checkpoint that is being written; see [Note: committing] and [Note: object stores]."""

    # Makes it the checkpoint, in one step, once all of its files are written.
    def commit(self, manifest: Manifest) -> None: ...
    # Gives up what was not committed.
    def close(self) -> None: ...


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

    def parent(self) -> Storage: ...
    def child(self, name: str) -> Storage: ...

    # As a committed checkpoint. The manifest can be read whatever the other files are like. A
    # defect is None if the checkpoint is whole, see [Note: whole], nothing if none was ever
    # committed, or what is damaged; all that says nothing about the checkpoint itself is raised.
    def open(self) -> CheckpointReader: ...
    def read_manifest(self) -> Manifest: ...
    def defect(self) -> str | None: ...

    # As a checkpoint to write, by a save that is called ``token``. One rank stages it, then all
    # ranks write: to the same files in the staging directory, if there is such a thing, or what
    # ``action`` creates, which may be called again. A rank whose save has failed discards that.
    def check_replaceable(self) -> None: ...
    def staging_directory(self, token: str) -> Path | None: ...
    def stage(self, token: str) -> StagedCheckpoint: ...
    def write(self, token: str, action: Callable[[Create], T]) -> T: ...
    def discard(self, name: str) -> None: ...

    # As what checkpoints lie in. Each is whole or none at every moment. Leftovers are what dead
    # writers have left; ``older`` are the names before the last whole checkpoint of a series.
    def names(self) -> Iterable[str]: ...
    def remove(self, names: Sequence[str]) -> None: ...
    def remove_leftovers(self, older: Sequence[str]) -> None: ...
