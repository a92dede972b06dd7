"""Write files one after the other, each from its first byte to its last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from vescale_ckpt._format.crc32 import PartialBlockCrcs, checksums
from vescale_ckpt._format.file_layout import FilePlan
from vescale_ckpt._format.manifest import StoredFile
from vescale_ckpt.exceptions import CorruptCheckpointError

BLOCK_NBYTES = 1 << 20

Content = Callable[[str], Iterable[memoryview]]
Create = Callable[[str], AbstractContextManager[BinaryIO]]
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Show nobody how many of how many bytes are done."""


def created_in(directory: Path) -> Create:
    """Return what opens new files of a directory, which are on the disk when they are closed."""
    return partial(_create, directory)


@contextmanager
def _create(directory: Path, name: str) -> Iterator[BinaryIO]:
    with open(directory / name, "xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def write_files_in_order(
    create: Create, plan: FilePlan, content: Content, progress: Progress = no_progress
) -> dict[str, StoredFile]:
    """Write files and return their lengths and checksums.

    ``content`` yields the bytes of the tensor of a key; ``progress`` is called with the bytes done
    and to do.
    """
    by_file: dict[str, list[tuple[int, str]]] = {name: [] for name in plan.files}
    for key, tensor in plan.tensors.items():
        by_file[tensor.file].append((tensor.offset, key))
    total = sum(file.nbytes for file in plan.files.values())
    done = 0
    written: dict[str, StoredFile] = {}
    for name, file in plan.files.items():
        crcs = PartialBlockCrcs(file.nbytes, BLOCK_NBYTES)
        tensors = (content(key) for _, key in sorted(by_file[name]))
        with create(name) as stream:
            for view in chain([memoryview(file.head)], chain.from_iterable(tensors)):
                stream.write(view)
                crcs.add(crcs.written_nbytes, view)
                progress(done + crcs.written_nbytes, total)
            if crcs.written_nbytes != file.nbytes:
                raise CorruptCheckpointError(
                    f"the tensors of {name!r} have {crcs.written_nbytes} bytes instead of "
                    f"{file.nbytes}"
                )
        done += file.nbytes
        words = checksums(file.nbytes, BLOCK_NBYTES, crcs.folded())
        written[name] = StoredFile(nbytes=file.nbytes, checksums=tuple(words))
    return written
