"""The commit record: the file that makes a directory a checkpoint. FORMAT.md describes it."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vescale_dtensor import Box

from ._crc import MAX_BLOCK_NBYTES, crc32
from ._dtypes import DTYPES
from ._files import StoredTensor
from ._tree import Json, is_reference, items_of
from .exceptions import CheckpointError, CorruptCheckpointError

RECORD_NAME = "vescale.json"
FORMAT_VERSION = 1

_PREFIX = re.compile(rb'\{"vescale_ckpt":(\d{1,9}),"crc32":"([0-9a-f]{8})",')
_NO_CHECKSUM = b"00000000"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_MAX_NBYTES = 1 << 62
_BLOCK_ALIGNMENT = 4096
# A million tensors on a petabyte need a quarter of this.
MAX_RECORD_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a committed checkpoint.

    Attributes:
        nbytes: Its length.
        checksums: CRC-32 of every block, in order.
    """

    nbytes: int
    checksums: tuple[int, ...]


class StoredBox(NamedTuple):
    """A box of a tensor that is not stored as a whole.

    Attributes:
        box: Which elements of the tensor.
        stored: Where they lie; its shape is that of the box.
    """

    box: Box
    stored: StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything there is to know about a checkpoint but the tensors' bytes.

    Attributes:
        block_nbytes: Length of the blocks that have a checksum each; the last may be shorter.
        files: All files but the record itself.
        tensors: Where each tensor lies, by its dotted key.
        aliases: Keys whose tensor is stored under another key.
        tree: The whole state as tagged JSON.
        boxes: The boxes of which tensors consist that are not stored as a whole; what
            ``tensors`` says about the file and the offset of such a tensor means nothing.
    """

    block_nbytes: int
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    tree: dict[str, Json]
    boxes: dict[str, tuple[StoredBox, ...]] = field(default_factory=dict[str, Any])

    def boxes_of(self, key: str) -> tuple[StoredBox, ...]:
        """Return what makes up the tensor that the tree calls ``key``."""
        key = self.aliases.get(key, key)
        if key in self.boxes:
            return self.boxes[key]
        stored = self.tensors[key]
        return (StoredBox(Box.whole(stored.shape), stored),)

    def extents(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the key of each stretch of a file that belongs to a tensor, and where it is."""
        for key, tensor in self.tensors.items():
            if key not in self.boxes:
                yield key, tensor
        for key, boxes in self.boxes.items():
            for _, stored in boxes:
                yield key, stored

    def stored(self, key: str) -> StoredTensor:
        """Return where the tensor that the tree calls ``key`` lies."""
        return self.tensors[self.aliases.get(key, key)]


def dump_record(record: Record) -> bytes:
    """Return the bytes of a commit record, its own checksum included."""
    body = {
        "block_nbytes": record.block_nbytes,
        "files": {
            name: {
                "nbytes": file.nbytes,
                "crc32": np.array(file.checksums, ">u4").tobytes().hex(),
            }
            for name, file in record.files.items()
        },
        "tensors": {
            key: [tensor.file, tensor.name, tensor.dtype, list(tensor.shape), tensor.offset]
            for key, tensor in record.tensors.items()
            if key not in record.boxes
        },
        "aliases": record.aliases,
        "state": record.tree,
    }
    if record.boxes:
        body["boxes"] = {key: _box_rows(record, key) for key in record.boxes}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    head = b'{"vescale_ckpt":%d,"crc32":"%%b",' % FORMAT_VERSION
    blank = head % _NO_CHECKSUM + text[1:]
    return head % b"%08x" % crc32(blank) + text[1:]


def _box_rows(record: Record, key: str) -> list[Any]:
    tensor = record.tensors[key]
    rows = [
        [stored.file, stored.name, list(box.offset), list(box.shape), stored.offset]
        for box, stored in record.boxes[key]
    ]
    return [tensor.dtype, list(tensor.shape), rows]


def read_text(stream: BinaryIO, where: str) -> bytes:
    """Return the content of a commit record, unless it is absurdly long."""
    if os.fstat(stream.fileno()).st_size > MAX_RECORD_NBYTES:
        raise CorruptCheckpointError(f"{where} is too long for a commit record; {_ADVICE}")
    return stream.read(MAX_RECORD_NBYTES)


def parse_record(text: bytes, where: str) -> Record:
    """Return the record that ``text`` holds, checked so that nothing in it can surprise.

    Args:
        text: The bytes of the file.
        where: Its path, for messages.

    Raises:
        CorruptCheckpointError: If a byte was changed or lost, or the content makes no sense.
        CheckpointError: If it was written by a newer version of this package.
    """
    prefix = _PREFIX.match(text)
    if prefix is None:
        raise CorruptCheckpointError(f"{where} does not begin like a commit record; {_ADVICE}")
    start, stop = prefix.span(2)
    if crc32(text[:start] + _NO_CHECKSUM + text[stop:]) != int(prefix[2], 16):
        raise CorruptCheckpointError(f"the checksum of {where} does not match; {_ADVICE}")
    if int(prefix[1]) > FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format version {int(prefix[1])}, this vescale-ckpt reads up to "
            f"{FORMAT_VERSION}; upgrade vescale-ckpt"
        )
    try:
        return _record_of(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(f"{where} makes no sense: {error}; {_ADVICE}") from error


_ADVICE = "the checkpoint is damaged, load another one"


def _record_of(body: Mapping[str, Any]) -> Record:
    block_nbytes = _integer(body["block_nbytes"], _BLOCK_ALIGNMENT, MAX_BLOCK_NBYTES)
    if block_nbytes % _BLOCK_ALIGNMENT:
        raise ValueError(f"blocks of {block_nbytes} bytes are no whole pages")
    files = {
        _file_name(name): _stored_file(name, file, block_nbytes)
        for name, file in _mapping(body["files"]).items()
    }
    tensors = {
        key: _stored_tensor(key, row, files) for key, row in _mapping(body["tensors"]).items()
    }
    boxes: dict[str, tuple[StoredBox, ...]] = {}
    for key, row in _mapping(body.get("boxes", {})).items():
        if key in tensors:
            raise ValueError(f"tensor {key!r} is stored twice")
        tensors[key], boxes[key] = _stored_boxes(key, row, files)
    aliases = _mapping(body["aliases"])
    for alias, key in aliases.items():
        if key not in tensors or alias in tensors:
            raise ValueError(f"{alias!r} is an alias of {key!r}, which is not stored")
    tree = _mapping(body["state"])
    for key in itertools.chain.from_iterable(map(_references, tree.values())):
        if key not in tensors and key not in aliases:
            raise ValueError(f"the state refers to tensor {key!r}, which is not stored")
    return Record(
        block_nbytes=block_nbytes,
        files=files,
        tensors=tensors,
        aliases=aliases,
        tree=tree,
        boxes=boxes,
    )


def _stored_boxes(
    key: str, row: Any, files: Mapping[str, StoredFile]
) -> tuple[StoredTensor, tuple[StoredBox, ...]]:
    dtype, shape, rows = row
    shape = tuple(_integer(size, 0, _MAX_NBYTES) for size in shape)
    if dtype not in DTYPES or len(shape) > 64:
        raise ValueError(f"tensor {key!r} has dtype {dtype!r} and shape {shape}")
    boxes: list[StoredBox] = []
    for file, name, offset, box_shape, start in rows:
        stored = _stored_tensor(key, [file, name, dtype, box_shape, start], files)
        box = Box(tuple(_integer(first, 0, _MAX_NBYTES) for first in offset), stored.shape)
        if len(box.offset) != len(shape) or box.intersect(Box.whole(shape)) != box:
            raise ValueError(f"tensor {key!r} of shape {shape} has no box {box}")
        boxes.append(StoredBox(box, stored))
    covered = sum(box.numel for box, _ in boxes)
    if covered != math.prod(shape):
        raise ValueError(f"the boxes of tensor {key!r} have {covered} elements, not all")
    return StoredTensor("", key, dtype, shape, 0), tuple(boxes)


def _references(node: Json) -> Iterator[str]:
    """Yield the keys of the tensors that a tree refers to."""
    if is_reference(node):
        yield node["$tensor"]
    elif isinstance(node, dict):
        items_of(node)  # refuses what is no node
        for item in node.values():
            yield from _references(item)
    elif isinstance(node, list):
        for item in node:
            if isinstance(item, (dict, list)):
                yield from _references(item)


def is_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint may be called so; a path may not."""
    return _FILE_NAME.fullmatch(name) is not None


def _file_name(name: str) -> str:
    if not is_file_name(name) or name == RECORD_NAME:
        raise ValueError(f"{name!r} is no file name of a checkpoint")
    return name


def _stored_file(name: str, file: Any, block_nbytes: int) -> StoredFile:
    nbytes = _integer(file["nbytes"], 0, _MAX_NBYTES)
    digits = file["crc32"]
    num_blocks = -(-nbytes // block_nbytes)
    if not isinstance(digits, str) or len(digits) != 8 * num_blocks:
        raise ValueError(f"file {name!r} of {nbytes} bytes needs {num_blocks} checksums")
    words = bytes.fromhex(digits)
    if len(words) != 4 * num_blocks:
        raise ValueError(f"file {name!r} has malformed checksums")
    checksums: list[int] = np.frombuffer(words, ">u4").tolist()
    return StoredFile(nbytes=nbytes, checksums=tuple(checksums))


def _stored_tensor(key: str, row: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    match row:
        case [str() as file, str() as name, str() as dtype, list() as shape, offset]:
            pass
        case _:
            raise ValueError(f"tensor {key!r} is described by {row!r}")
    if file not in files or dtype not in DTYPES:
        raise ValueError(f"tensor {key!r} has unknown file {file!r} or dtype {dtype!r}")
    for number in (*shape, offset):
        if type(number) is not int or not 0 <= number <= _MAX_NBYTES:
            raise ValueError(f"tensor {key!r} has shape {shape} at byte {offset!r}")
    itemsize = DTYPES[dtype].itemsize
    if len(shape) > 64 or offset + math.prod(shape) * itemsize > files[file].nbytes:
        raise ValueError(f"tensor {key!r} does not fit into file {file!r}")
    if offset % itemsize:
        raise ValueError(f"tensor {key!r} at byte {offset} is not aligned")
    return StoredTensor(file, name, dtype, tuple(shape), offset)


def _integer(value: Any, minimum: int, maximum: int) -> int:
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"expected an integer from {minimum} to {maximum}, got {value!r}")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value
