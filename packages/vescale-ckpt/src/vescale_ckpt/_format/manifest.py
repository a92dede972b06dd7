"""The manifest: the file that makes a directory a checkpoint. FORMAT.md describes it."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError
from vescale_dtensor import Box

from .crc32 import MAX_BLOCK_NBYTES, crc32
from .dtypes import DTYPES
from .file_layout import HEADER_ALIGNMENT, StoredTensor, TensorRun
from .state_tree import Json, complete
from .strict_json import strict_json

MANIFEST_NAME = "vescale.json"
FORMAT_VERSION = 2

_PREFIX = re.compile(rb'\{"vescale_ckpt":(\d{1,9}),"crc32":"([0-9a-f]{8})",')
_NO_CHECKSUM = b"00000000"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_MAX_NBYTES = 1 << 62
_MAX_DIMS = 64
_BLOCK_ALIGNMENT = 4096
# A million tensors on a petabyte need a quarter of this.
MAX_MANIFEST_NBYTES = 1 << 30


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
class Manifest:
    """Everything there is to know about a checkpoint but the tensors' bytes.

    Attributes:
        block_nbytes: Length of the blocks that have a checksum each; the last may be shorter.
        files: All files but the manifest itself.
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


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, its own checksum included.

    Raises:
        CheckpointError: If it is longer than what is read.
    """
    files = {name: _file_members(file) for name, file in manifest.files.items()}
    whole = (item for item in manifest.tensors.items() if item[0] not in manifest.boxes)
    for (file, _, _), tensors in itertools.groupby(whole, key=_kind_and_file):
        _add_tensors(files[file], list(tensors))
    body: dict[str, Any] = {
        "block_nbytes": manifest.block_nbytes,
        "files": files,
        "aliases": manifest.aliases,
        "state": manifest.tree,
    }
    if manifest.boxes:
        body["boxes"] = {key: _box_rows(manifest, key) for key in manifest.boxes}
    # The tree was made by this package and has no cycles.
    text = json.dumps(body, separators=(",", ":"), allow_nan=False, check_circular=False).encode()
    head = b'{"vescale_ckpt":%d,"crc32":"%%b",' % FORMAT_VERSION
    if len(text) + len(head) > MAX_MANIFEST_NBYTES:
        raise CheckpointError(
            f"the values of the state and the names of its tensors take {len(text)} bytes, a "
            f"manifest has at most {MAX_MANIFEST_NBYTES}; store long lists of numbers as tensors"
        )
    blank = head % _NO_CHECKSUM + text[1:]
    return head % b"%08x" % crc32(blank) + text[1:]


def _file_members(file: StoredFile) -> dict[str, Any]:
    digits = np.array(file.checksums, ">u4").tobytes().hex()
    return {"nbytes": file.nbytes, "crc32": digits}


def _kind_and_file(item: tuple[str, StoredTensor]) -> tuple[str, str, tuple[int, ...]]:
    stored = item[1]
    return stored.file, stored.dtype, stored.shape


def _add_tensors(members: dict[str, Any], tensors: list[tuple[str, StoredTensor]]) -> None:
    """Describe tensors that are alike and lie one after the other."""
    key, first = tensors[0]
    names = [stored.name for _, stored in tensors]
    run = TensorRun(first.file, first.dtype, first.shape, first.offset, names)
    last = tensors[-1][1]
    assert run.stop == last.offset + last.nbytes
    members["prefix"] = key.removesuffix(first.name)
    members.setdefault("tensors", []).append([*run[1:]])


def _box_rows(manifest: Manifest, key: str) -> list[Any]:
    tensor = manifest.tensors[key]
    rows = [
        [stored.file, stored.name, list(box.offset), list(box.shape), stored.offset]
        for box, stored in manifest.boxes[key]
    ]
    return [tensor.dtype, list(tensor.shape), rows]


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Return the manifest that ``text`` holds, checked so that nothing in it can surprise.

    Raises:
        CorruptCheckpointError: If a byte was changed or lost, or the content makes no sense.
        CheckpointError: If it is of another version of the format.
    """
    prefix = _PREFIX.match(text)
    if prefix is None:
        raise CorruptCheckpointError(f"{where} does not begin like a manifest; {_ADVICE}")
    start, stop = prefix.span(2)
    if crc32(text[:start] + _NO_CHECKSUM + text[stop:]) != int(prefix[2], 16):
        raise CorruptCheckpointError(f"the checksum of {where} does not match; {_ADVICE}")
    if (version := int(prefix[1])) != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format version {version}, this vescale-ckpt reads {FORMAT_VERSION}; "
            + ("upgrade vescale-ckpt" if version > FORMAT_VERSION else _UNRELEASED)
        )
    try:
        return _manifest_of(strict_json(text))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(f"{where} makes no sense: {error}; {_ADVICE}") from error


_ADVICE = "the checkpoint is damaged, load another one"
_UNRELEASED = "no release of vescale-ckpt has written that one"


def _manifest_of(body: Mapping[str, Any]) -> Manifest:
    block_nbytes = _integer(body["block_nbytes"], _BLOCK_ALIGNMENT, MAX_BLOCK_NBYTES)
    if block_nbytes % _BLOCK_ALIGNMENT:
        raise ValueError(f"blocks of {block_nbytes} bytes are no whole pages")
    files = {
        _file_name(name): _stored_file(name, file, block_nbytes)
        for name, file in _mapping(body["files"]).items()
    }
    tensors: dict[str, StoredTensor] = {}
    for name, members in body["files"].items():
        _read_tensors(tensors, name, members, files[name].nbytes)
    boxes: dict[str, tuple[StoredBox, ...]] = {}
    for key, row in _mapping(body.get("boxes", {})).items():
        if key in tensors:
            raise ValueError(f"tensor {key!r} is stored twice")
        tensors[key], boxes[key] = _stored_boxes(key, row, files)
    _check_boxes_apart(boxes, files)
    aliases = _mapping(body["aliases"])
    for alias, key in aliases.items():
        if key not in tensors or alias in tensors:
            raise ValueError(f"{alias!r} is an alias of {key!r}, which is not stored")
    stored = ChainMap(tensors, aliases) if aliases else tensors
    tree = {key: complete(node, key, stored) for key, node in _mapping(body["state"]).items()}
    return Manifest(
        block_nbytes=block_nbytes,
        files=files,
        tensors=tensors,
        aliases=aliases,
        tree=tree,
        boxes=boxes,
    )


def _check_boxes_apart(
    boxes: Mapping[str, tuple[StoredBox, ...]], files: Mapping[str, StoredFile]
) -> None:
    """Refuse boxes that lie over one another, in a file or in a tensor."""
    stored = sorted(
        (box.stored.file, box.stored.offset, box.stored.nbytes, box.stored.name)
        for found in boxes.values()
        for box in found
    )
    ends = dict.fromkeys(files, HEADER_ALIGNMENT)
    for file, offset, nbytes, name in stored:
        if offset < ends[file]:
            raise ValueError(
                f"tensor {name!r} at byte {offset} of file {file!r} lies over another or over "
                f"the header"
            )
        ends[file] = offset + nbytes


def _stored_boxes(
    key: str, row: Any, files: Mapping[str, StoredFile]
) -> tuple[StoredTensor, tuple[StoredBox, ...]]:
    dtype, shape, rows = row
    shape = tuple(_integer(size, 0, _MAX_NBYTES) for size in shape)
    if dtype not in DTYPES or len(shape) > _MAX_DIMS:
        raise ValueError(f"tensor {key!r} has dtype {dtype!r} and shape {shape}")
    boxes: list[StoredBox] = []
    for file, name, offset, box_shape, start in rows:
        run = _tensor_run(file, dtype, box_shape, start, [name], files[file].nbytes)
        (stored,) = run.tensors()
        box = Box(tuple(_integer(first, 0, _MAX_NBYTES) for first in offset), stored.shape)
        if len(box.offset) != len(shape) or box.intersect(Box.whole(shape)) != box:
            raise ValueError(f"tensor {key!r} of shape {shape} has no box {box}")
        boxes.append(StoredBox(box, stored))
    covered = sum(box.numel for box, _ in boxes)
    if covered != math.prod(shape):
        raise ValueError(f"the boxes of tensor {key!r} have {covered} elements, not all")
    return StoredTensor("", key, dtype, shape, 0), tuple(boxes)


def is_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint may be called so; a path may not."""
    return _FILE_NAME.fullmatch(name) is not None


def _file_name(name: str) -> str:
    if not is_file_name(name) or name == MANIFEST_NAME:
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


def _read_tensors(
    tensors: dict[str, StoredTensor], file: str, members: Mapping[str, Any], nbytes: int
) -> None:
    """Find out where the tensors of a file lie."""
    prefix = members.get("prefix", "")
    if not isinstance(prefix, str):
        raise TypeError(f"file {file!r} has keys that begin with {prefix!r}")
    stop: int | None = None
    for row in members.get("tensors", ()):
        dtype, shape, offset, names = row
        run = _tensor_run(file, dtype, shape, offset, names, nbytes)
        if run.offset != stop if stop is not None else run.offset < HEADER_ALIGNMENT:
            before = "the header" if stop is None else f"byte {stop}, where the one before ends"
            raise ValueError(
                f"tensor {names[:1]} of file {file!r} begins at byte {run.offset}, expected it "
                f"right behind {before}"
            )
        stop = run.stop
        known = len(tensors)
        tensors.update(zip([prefix + name for name in names], run.tensors(), strict=True))
        if len(tensors) != known + len(names):
            raise ValueError(f"file {file!r} has tensors with keys that others have, too")
    if stop is not None and stop != nbytes:
        raise ValueError(f"the tensors of file {file!r} end at byte {stop} of {nbytes}")


def _tensor_run(
    file: str, dtype: Any, shape: Any, offset: Any, names: Any, file_nbytes: int
) -> TensorRun:
    """Return where tensors lie, if that makes sense."""
    if not isinstance(names, list) or not set(map(type, names)) <= {str}:
        raise TypeError(f"file {file!r} has tensors with odd names")
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"file {file!r} has tensors of unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        raise ValueError(f"file {file!r} has tensors of a shape that cannot be")
    sizes = tuple(_integer(size, 0, _MAX_NBYTES) for size in shape)
    run = TensorRun(file, dtype, sizes, _integer(offset, 0, _MAX_NBYTES), names)
    if run.stop > file_nbytes:
        raise ValueError(f"tensors {names[:4]} do not fit into file {file!r}")
    if offset % DTYPES[dtype].itemsize:
        raise ValueError(f"tensors {names[:4]} at byte {offset} of {file!r} are not aligned")
    return run


def _integer(value: Any, minimum: int, maximum: int) -> int:
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"expected an integer from {minimum} to {maximum}, got {value!r}")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value
