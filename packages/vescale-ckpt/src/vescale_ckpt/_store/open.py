"""Open a checkpoint wherever it is."""

from __future__ import annotations

import os
from pathlib import Path

from vescale_ckpt._format.manifest import MANIFEST_NAME, Manifest
from vescale_ckpt._io.object_store import object_store_of
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError

from .atomic_directory import is_there, place_of, read_manifest as read_manifest_in
from .object_reader import ObjectStoreReader, read_manifest_of
from .reader import CheckpointReader


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open the committed checkpoint at a path or a URL."""
    storage = object_store_of(path)
    if storage is None:
        return _open_directory(Path(os.path.abspath(path)))
    return _open_directory(Path(storage.root)) if storage.is_local else ObjectStoreReader(storage)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint, whatever its other files are like."""
    storage = object_store_of(path)
    if storage is None or storage.is_local:
        return read_manifest_in(Path(path if storage is None else storage.root))
    return read_manifest_of(storage)[1]


def _open_directory(path: Path) -> CheckpointReader:
    """Open the committed checkpoint at ``path``, or the one that was being replaced there."""
    where = place_of(path)
    if not is_there(where):
        raise CheckpointError(f"there is no checkpoint at {path}: no such directory")
    if not where.is_dir():
        raise CheckpointError(
            f"there is no checkpoint at {path}: expected a directory, got a file"
        )
    if not is_there(where / MANIFEST_NAME):
        raise CorruptCheckpointError(
            f"there is no checkpoint at {path}: {MANIFEST_NAME}, the file written last, is "
            f"missing; the save did not finish, or this is another kind of directory"
        )
    return CheckpointReader(where)
