"""Read byte ranges of a committed checkpoint: check blocks, fill tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from vescale_dtensor import LocalBox

from ._boxes import Part
from ._crc import crc32
from ._dtypes import DTYPES
from ._files import StoredTensor
from ._record import RECORD_NAME, Record, parse_record, read_text
from ._runs import Runs, runs_of
from ._tensor_bytes import CHUNK_NBYTES, flat_bytes, parts_of
from .exceptions import CorruptCheckpointError

# Shorter runs are read together with what lies between them.
_MIN_REQUEST_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor and the memory it is to be read into."""

    key: str
    stored: StoredTensor
    runs: Runs
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive blocks of a file, at most CHUNK_NBYTES together."""

    file: str
    start: int
    stop: int


class Reader:
    """The open files of one checkpoint.

    The files stay readable, and stay those of this one checkpoint, even if a save replaces the
    directory meanwhile.

    Args:
        path: The checkpoint's directory.
        record: What its files hold; None to read the commit record.
        follow_links: Whether files may be symbolic links.

    Attributes:
        path: The checkpoint's directory.
        record: What its files hold.
        digest: A number that differs between committed checkpoints.
    """

    def __init__(
        self, path: Path, record: Record | None = None, *, follow_links: bool = False
    ) -> None:
        self.path = path
        self.digest = 0
        self._flags = os.O_RDONLY | (0 if follow_links else os.O_NOFOLLOW)
        self._descriptors: dict[str, int] = {}
        self._local = threading.local()
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if record is None:
                text = _content(directory, str(path / RECORD_NAME))
                self.digest = crc32(text)
                record = parse_record(text, str(path / RECORD_NAME))
            self.record = record
            self._open(directory)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(directory)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def pieces(self, targets: Iterable[tuple[Part, str]]) -> list[Piece]:
        """Return what has to be read to fill this rank's part of ``targets``."""
        pieces: list[Piece] = []
        for part, key in targets:
            stored = self.record.stored(key)
            pieces += [
                _piece(key, stored, held, part.local) for held in part.boxes if held.box.numel
            ]
        return sorted(pieces, key=lambda piece: (piece.stored.file, int(piece.runs.offsets[0])))

    def check_blocks(self, blocks: Blocks) -> None:
        """Read consecutive blocks and compare their checksums.

        Raises:
            CorruptCheckpointError: With the file, the bytes, and the tensors that lie there.
        """
        file, length = blocks.file, self.record.block_nbytes
        start = blocks.start * length
        view = self._scratch()[: min(blocks.stop * length, self.record.files[file].nbytes) - start]
        self._read(file, start, view)
        for number in range(blocks.start, blocks.stop):
            position = number * length - start
            content = view[position : position + length]
            if crc32(content) != self.record.files[file].checksums[number]:
                first, last = start + position, start + position + len(content)
                raise CorruptCheckpointError(
                    f"{self.path / file}: bytes {first} to {last} do not match their checksum, "
                    f"{self._tensors_at(file, first, last)}; the file is damaged, load another "
                    f"checkpoint"
                )

    def content(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return some bytes of a file."""
        nbytes = max(0, min(nbytes, self.record.files[file].nbytes - offset))
        buffer = bytearray(nbytes)
        self._read(file, offset, memoryview(buffer))
        return bytes(buffer)

    @torch.no_grad()
    def fill(self, piece: Piece) -> None:
        """Read a box into its memory, converting it if that has another dtype."""
        dtype = DTYPES[piece.stored.dtype]
        direct = flat_bytes(piece.target)
        if direct is not None and piece.target.dtype == dtype:
            self._fill_flat(piece, 0, direct)
            return
        start = 0
        for part in parts_of(piece.target):
            packed = torch.empty(part.shape, dtype=dtype)
            view = flat_bytes(packed)
            assert view is not None
            self._fill_flat(piece, start, view)
            part.copy_(packed)
            start += len(view)

    def _fill_flat(self, piece: Piece, start: int, view: memoryview) -> None:
        file, runs = piece.stored.file, piece.runs
        if runs.nbytes >= _MIN_REQUEST_NBYTES or start % runs.nbytes or len(view) % runs.nbytes:
            for offset, lower, upper in runs.locate(start, len(view)):
                self._read(file, offset, view[lower:upper])
            return
        first = start // runs.nbytes
        self._gather(file, runs, first, first + len(view) // runs.nbytes, view)

    def _gather(self, file: str, runs: Runs, first: int, last: int, view: memoryview) -> None:
        """Read short runs a bufferful at a time, with what lies between them."""
        nbytes = runs.nbytes
        target = np.frombuffer(view, np.uint8).reshape(last - first, nbytes)
        buffer = self._scratch()
        # A stretch of runs at equal distances is one strided copy.
        for start, stop, step in runs.stretches(first, last):
            rows = max(1, (len(buffer) - nbytes) // step + 1)
            for row in range(start, stop, rows):
                count = min(rows, stop - row)
                span = buffer[: (count - 1) * step + nbytes]
                self._read(file, int(runs.offsets[row]), span)
                band = np.frombuffer(span, np.uint8)
                target[row - first : row - first + count] = as_strided(
                    band, (count, nbytes), (step, 1), writeable=False
                )

    def _scratch(self) -> memoryview:
        """Return a buffer of this thread that stays allocated."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(CHUNK_NBYTES))
        return self._local.buffer

    def _read(self, file: str, offset: int, view: memoryview) -> None:
        descriptor = self._descriptors[file]
        while view:
            count = os.preadv(descriptor, [view], offset)
            if count == 0:
                raise CorruptCheckpointError(
                    f"{self.path / file} ends at byte {offset}, within "
                    f"{self._tensors_at(file, offset, offset + len(view))}"
                )
            view, offset = view[count:], offset + count

    def _open(self, directory: int) -> None:
        for name, file in self.record.files.items():
            try:
                descriptor = os.open(name, self._flags, dir_fd=directory)
            except OSError as error:
                raise CorruptCheckpointError(
                    f"cannot open {self.path / name}, a file of the checkpoint with "
                    f"{self._tensors_at(name, 0, file.nbytes)}: {error.strerror}"
                ) from error
            self._descriptors[name] = descriptor
            actual = os.fstat(descriptor).st_size
            if actual != file.nbytes:
                lost = self._tensors_at(name, min(actual, file.nbytes), file.nbytes)
                raise CorruptCheckpointError(
                    f"{self.path / name} has {actual} bytes, the checkpoint was committed with "
                    f"{file.nbytes}, {lost}; the file is damaged, load another checkpoint"
                )

    def _tensors_at(self, file: str, start: int, stop: int) -> str:
        names = [
            repr(key)
            for key, tensor in self.record.tensors.items()
            if tensor.file == file
            and tensor.offset < stop
            and tensor.offset + tensor.nbytes > start
        ]
        if not names:
            return "no tensor"
        return f"tensors {', '.join(names[:4])}" + (", ..." if len(names) > 4 else "")


def _content(directory: int, where: str) -> bytes:
    descriptor = os.open(RECORD_NAME, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    with open(descriptor, "rb") as stream:
        return read_text(stream, where)


def _piece(key: str, stored: StoredTensor, held: LocalBox, local: torch.Tensor) -> Piece:
    runs = runs_of(stored.shape, held.box, stored.itemsize, stored.offset)
    return Piece(key, stored, runs, local[held.local_slices])


def blocks_of(pieces: Sequence[Piece], block_nbytes: int) -> dict[str, list[tuple[int, int]]]:
    """Return half-open intervals of the blocks that ``pieces`` touch, by file."""
    touched: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        first = int(piece.runs.offsets[0]) // block_nbytes
        last = (int(piece.runs.offsets[-1]) + piece.runs.nbytes - 1) // block_nbytes
        touched.setdefault(piece.stored.file, []).append((first, last + 1))
    return {file: merged(intervals) for file, intervals in touched.items()}


def merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of half-open intervals."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def share(
    intervals: dict[str, list[tuple[int, int]]], block_nbytes: int, rank: int, size: int
) -> Iterator[Blocks]:
    """Yield the blocks that one of ``size`` ranks has to check, all about equally many."""
    total = sum(stop - start for spans in intervals.values() for start, stop in spans)
    lower, upper = total * rank // size, total * (rank + 1) // size
    most = CHUNK_NBYTES // block_nbytes
    position = 0
    for file in sorted(intervals):
        for start, stop in intervals[file]:
            first = start + max(lower - position, 0)
            last = start + min(upper - position, stop - start)
            for block in range(first, last, most):
                yield Blocks(file, block, min(block + most, last))
            position += stop - start
