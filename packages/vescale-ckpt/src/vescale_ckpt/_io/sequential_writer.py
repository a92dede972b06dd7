"""Write files one after the other, each from its first byte to its last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from vescale_ckpt._format.crc32 import crc32
from vescale_ckpt._format.file_layout import FilePlan
from vescale_ckpt._format.manifest import StoredFile
from vescale_ckpt.exceptions import CorruptCheckpointError

BLOCK_NBYTES = 1 << 20

Content = Callable[[str], Iterable[memoryview]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Files to write: where each tensor goes, and how to get its bytes.

    Attributes:
        plan: The layout.
        content: Yields the bytes of the tensor of a key.
    """

    plan: FilePlan
    content: Content


def created_in(directory: Path) -> Callable[[str], AbstractContextManager[BinaryIO]]:
    """Return what opens new files of a directory, which are on the disk when they are closed."""
    return partial(_create, directory)


@contextmanager
def _create(directory: Path, name: str) -> Iterator[BinaryIO]:
    with open(directory / name, "xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def write_files_in_order(
    create: Callable[[str], AbstractContextManager[BinaryIO]],
    copied: Copied,
    progress: Progress = lambda done, total: None,
) -> dict[str, StoredFile]:
    """Write files and return their lengths and checksums.

    Args:
        create: Opens the file of a name for writing.
        copied: What to write.
        progress: Called with the number of bytes done and to do.
    """
    by_file: dict[str, list[tuple[int, str]]] = {name: [] for name in copied.plan.files}
    for key, tensor in copied.plan.tensors.items():
        by_file[tensor.file].append((tensor.offset, key))
    total = sum(file.nbytes for file in copied.plan.files.values())
    done = 0
    written: dict[str, StoredFile] = {}
    for name, file in copied.plan.files.items():
        sums = _BlockCrcs()
        nbytes = 0
        with create(name) as stream:
            for view in _bytes_of(file.head, sorted(by_file[name]), copied.content):
                stream.write(view)
                sums.add(view)
                nbytes += len(view)
                progress(done + nbytes, total)
            if nbytes != file.nbytes:
                raise CorruptCheckpointError(
                    f"the tensors of {name!r} have {nbytes} bytes instead of {file.nbytes}"
                )
        done += nbytes
        written[name] = StoredFile(nbytes=file.nbytes, checksums=sums.finished())
    return written


def _bytes_of(
    head: bytes, tensors: Iterable[tuple[int, str]], content: Content
) -> Iterator[memoryview]:
    yield memoryview(head)
    for _, key in tensors:
        yield from content(key)


class _BlockCrcs:
    """The checksum of each block of a stream."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._current = 0
        self._filled = 0

    def add(self, view: memoryview) -> None:
        while view:
            part = view[: BLOCK_NBYTES - self._filled]
            self._current = crc32(part, self._current)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOCK_NBYTES:
                self._end_block()

    def finished(self) -> tuple[int, ...]:
        if self._filled:
            self._end_block()
        return tuple(self._sums)

    def _end_block(self) -> None:
        self._sums.append(self._current)
        self._current = self._filled = 0
