"""Read checkpoints in object stores."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from vescale_ckpt._format.byte_ranges import Bytes
from vescale_ckpt._format.crc32 import crc32
from vescale_ckpt._format.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    StoredFile,
    parse_manifest,
)
from vescale_ckpt._io.object_store import ObjectStore
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError

from .reader import CheckpointReader


def read_manifest_of(storage: ObjectStore) -> tuple[int, Manifest]:
    """Return the checksum of a checkpoint's manifest, and the manifest.

    Raises:
        CheckpointError: If there is none.
        CorruptCheckpointError: If it is damaged.
    """
    where = f"{storage.url}/{MANIFEST_NAME}"
    try:
        nbytes = storage.nbytes(MANIFEST_NAME)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint at {storage.url}: {error}") from error
    if nbytes > MAX_MANIFEST_NBYTES:
        raise CorruptCheckpointError(f"{where} is too long for a manifest")
    text = storage.read(MANIFEST_NAME, 0, nbytes)
    return crc32(text), parse_manifest(text, where)


def has_manifest(storage: ObjectStore) -> bool:
    """Return whether there is a manifest, sound or not."""
    try:
        storage.nbytes(MANIFEST_NAME)
    except FileNotFoundError:
        return False
    return True


def odd_file(
    storage: ObjectStore, files: Mapping[str, StoredFile]
) -> tuple[str, int | None] | None:
    """Return the first file that has not the length it should have, and what it has.

    One request lists them; what the listing lacks is asked for one by one. The length of a file
    that is missing is None.
    """
    lengths = storage.lengths()
    for name, file in files.items():
        try:
            actual = lengths[name] if name in lengths else storage.nbytes(name)
        except FileNotFoundError:
            return name, None
        if actual != file.nbytes:
            return name, actual
    return None


class ObjectStoreReader(CheckpointReader):
    """Reads by requests to a storage what Reader reads from open files."""

    has_page_cache = False

    def __init__(self, storage: ObjectStore) -> None:
        self.path = Path(storage.url)
        self._storage = storage
        self._local = threading.local()
        self._buffers: list[Bytes] = []
        self.digest, self.manifest = read_manifest_of(storage)
        self._check_lengths()

    def _check_lengths(self) -> None:
        odd = odd_file(self._storage, self.manifest.files)
        if odd is None:
            return
        name, actual = odd
        nbytes = self.manifest.files[name].nbytes
        if actual is None:
            raise CorruptCheckpointError(
                f"{self._storage.url}/{name}, a file of the checkpoint with "
                f"{self._tensors_at(name, 0, nbytes)}, is missing"
            )
        raise CorruptCheckpointError(
            f"{self._storage.url}/{name} has {actual} bytes, the checkpoint was committed "
            f"with {nbytes}; the file is damaged, load another checkpoint"
        )

    def close(self) -> None:
        """Do nothing: no file is open."""

    def bring_in(self, file: str, start: int, stop: int) -> bool:
        """Return False: no page cache would keep it."""
        return False

    def is_cached(self, file: str, start: int, stop: int) -> bool:
        """Return False: what is read comes from the storage."""
        return False

    def _read_pages(self, file: str, offset: int, memory: Bytes, nbytes: int) -> None:
        self.read(file, offset, memory.data[:nbytes])

    def read(self, file: str, offset: int, view: memoryview) -> None:
        content = self._storage.read(file, offset, len(view))
        if len(content) != len(view):
            raise CorruptCheckpointError(
                f"{self._storage.url}/{file} ends at byte {offset + len(content)}, within "
                f"{self._tensors_at(file, offset, offset + len(view))}"
            )
        view[:] = content
