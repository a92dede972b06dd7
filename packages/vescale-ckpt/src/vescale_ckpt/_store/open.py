"""Find and open a checkpoint wherever it is."""

from __future__ import annotations

import os

from vescale_ckpt._io.object_store import absolute_path, object_store_of

from .directory_storage import DirectoryStorage
from .object_storage import ObjectStorage
from .reader import CheckpointReader
from .storage import Storage


def storage_at(path: str | os.PathLike[str]) -> Storage:
    """Return the storage at a path or a URL.

    Raises:
        ValueError: If it is a URL that has lost a slash.
        CheckpointError: If the URL is of a kind that cannot be used here.
    """
    store = object_store_of(path)
    if store is None or store.is_local:
        return DirectoryStorage(absolute_path(path if store is None else store.root))
    return ObjectStorage(store)


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open the committed checkpoint at a path or a URL."""
    return storage_at(path).open()
