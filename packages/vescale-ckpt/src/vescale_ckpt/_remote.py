"""Read checkpoints of storages that are no directories."""

from __future__ import annotations

import threading
from pathlib import Path

from ._crc import crc32
from ._read import Reader
from ._record import MAX_RECORD_NBYTES, RECORD_NAME, Record, parse_record
from ._runs import Bytes
from ._storage import Storage
from .exceptions import CheckpointError, CorruptCheckpointError


def read_record_of(storage: Storage) -> tuple[int, Record]:
    """Return the checksum of a checkpoint's commit record, and the record.

    Raises:
        CheckpointError: If there is none.
        CorruptCheckpointError: If it is damaged.
    """
    where = f"{storage.url}/{RECORD_NAME}"
    try:
        nbytes = storage.nbytes(RECORD_NAME)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint at {storage.url}: {error}") from error
    if nbytes > MAX_RECORD_NBYTES:
        raise CorruptCheckpointError(f"{where} is too long for a commit record")
    text = storage.read(RECORD_NAME, 0, nbytes)
    return crc32(text), parse_record(text, where)


class RemoteReader(Reader):
    """Reads by requests to a storage what Reader reads from open files.

    Args:
        storage: Where the checkpoint is.
    """

    def __init__(self, storage: Storage) -> None:
        self.path = Path(storage.url)
        self._storage = storage
        self._local = threading.local()
        self._descriptors: dict[str, int] = {}
        self._direct: dict[str, int | None] = {}
        self.digest, self.record = read_record_of(storage)
        self._check_lengths()

    def _check_lengths(self) -> None:
        for name, file in self.record.files.items():
            try:
                actual = self._storage.nbytes(name)
            except FileNotFoundError as error:
                raise CorruptCheckpointError(
                    f"{self._storage.url}/{name}, a file of the checkpoint with "
                    f"{self._tensors_at(name, 0, file.nbytes)}, is missing"
                ) from error
            if actual != file.nbytes:
                raise CorruptCheckpointError(
                    f"{self._storage.url}/{name} has {actual} bytes, the checkpoint was committed "
                    f"with {file.nbytes}; the file is damaged, load another checkpoint"
                )

    def _read_pages(self, file: str, offset: int, memory: Bytes, nbytes: int) -> None:
        self._read(file, offset, memory.data[:nbytes])

    def _read(self, file: str, offset: int, view: memoryview) -> None:
        content = self._storage.read(file, offset, len(view))
        if len(content) != len(view):
            raise CorruptCheckpointError(
                f"{self._storage.url}/{file} ends at byte {offset + len(content)}, within "
                f"{self._tensors_at(file, offset, offset + len(view))}"
            )
        view[:] = content
