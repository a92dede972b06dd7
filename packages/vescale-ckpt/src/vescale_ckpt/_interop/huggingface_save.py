"""Write a sharded model as HuggingFace's libraries lay one out, one tensor after the other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vescale_ckpt._comm.control_group import AllOrNone, ControlGroup, current_control_group
from vescale_ckpt._format.dtypes import NAMES
from vescale_ckpt._format.file_layout import nbytes_of
from vescale_ckpt._io.tensor_bytes import packed_chunks
from vescale_ckpt._store.atomic_directory import sync_directory
from vescale_ckpt.exceptions import CheckpointError

Convert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

# How long a rank waits for the others to come; a call on one rank alone ends then, with an error.
_TIMEOUT = timedelta(minutes=5)
_STAGING = ".vescale-export"


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes: its file, the first byte there, and what it is."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Files:
    """The files of a model.

    Attributes:
        heads: Header of each, by name.
        places: Where tensors lie, by name.
        index: The text of the index; None for a single file.
    """

    heads: Mapping[str, bytes]
    places: Mapping[str, _Place]
    index: str | None


def save_safetensors(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    convert: Convert | None = None,
    together: Iterable[Sequence[str]] = (),
    max_file_nbytes: int = 5 * 10**9,
    stem: str = "model",
    metadata: Mapping[str, Any] | None = None,
    beside: Callable[[Path], None] | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Write tensors, sharded or not, as ``model.safetensors`` or numbered files with an index.

    Every rank of the default process group must call this. Tensors are gathered one by one and
    written by rank 0; no rank ever holds more than the largest of them besides its shards. Files
    are those that HuggingFace's libraries would write of the same tensors, in the same order. They
    appear when all are written, and replace those of a model that was there.

    Args:
        directory: Where to write; made if there is none. Shared with rank 0 only.
        tensors: What to write, by name, the same on every rank. Tied ones are written twice.
        convert: Given whole tensors by name, returns what to write of them; also called with
            tensors on the meta device.
        together: Names that are converted in one call; others are in one each.
        max_file_nbytes: When to begin another file.
        stem: What files are called.
        metadata: More entries for the index.
        beside: Called on rank 0 with the directory, to write what belongs beside the tensors.
        timeout: How long ranks wait for one another; None for five minutes.

    Raises:
        CheckpointError: On every rank, if it could not be written on one, ranks were given other
            tensors, or a rank did not come.
    """
    ranks = current_control_group(timeout or _TIMEOUT)
    with ranks.together(), torch.no_grad():
        with AllOrNone(ranks) as step:
            units = _units(tensors, together)
            convert = convert or dict
            files = _plan(tensors, units, convert, max_file_nbytes, stem, dict(metadata or {}))
            step.message = sha256(repr((units, files)).encode()).hexdigest()
        if len(set(step.messages)) > 1:
            raise ranks.common(
                CheckpointError("ranks were given other tensors to write: names, shapes or dtypes")
            )
        target = Path(os.path.abspath(directory))
        with AllOrNone(ranks):
            if ranks.rank == 0:
                _begin(target / _STAGING, files)
                if beside is not None:
                    beside(target)
        _write(target, tensors, units, convert, files, stem, ranks)


def _units(tensors: Mapping[str, Tensor], together: Iterable[Sequence[str]]) -> list[list[str]]:
    joint = [list(names) for names in together]
    of_name = {name: index for index, names in enumerate(joint) for name in names}
    units: list[list[str]] = []
    taken: set[int] = set()
    for name in tensors:
        at = of_name.get(name)
        if at is None:
            units.append([name])
        elif at not in taken:
            taken.add(at)
            units.append(joint[at])
    return units


def _plan(
    tensors: Mapping[str, Tensor],
    units: Sequence[Sequence[str]],
    convert: Convert,
    max_file_nbytes: int,
    stem: str,
    metadata: dict[str, Any],
) -> _Files:
    found: dict[str, Tensor] = {}
    for names in units:
        given = {
            name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta")
            for name in names
        }
        for name, tensor in convert(given).items():
            if tensor.dtype not in NAMES:
                raise CheckpointError(f"{name!r} has dtype {tensor.dtype}, unknown to safetensors")
            if name in found:
                raise CheckpointError(f"two tensors would be called {name!r}")
            found[name] = tensor
    shards = _split(found, max_file_nbytes)
    heads: dict[str, bytes] = {}
    places: dict[str, _Place] = {}
    for index, names in enumerate(shards):
        numbered = f"-{index + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"{stem}{numbered}.safetensors"
        heads[file] = _lay_out(file, {name: found[name] for name in names}, places)
    if len(shards) == 1:
        return _Files(heads, places, None)
    total = sum(_nbytes(tensor) for tensor in found.values())
    weight_map = {name: places[name].file for name in found}
    index_of = {"metadata": metadata | {"total_size": total}, "weight_map": weight_map}
    return _Files(heads, places, json.dumps(index_of, indent=2, sort_keys=True) + "\n")


def _nbytes(tensor: Tensor) -> int:
    return nbytes_of(NAMES[tensor.dtype], tuple(tensor.shape))


def _split(tensors: Mapping[str, Tensor], max_file_nbytes: int) -> list[list[str]]:
    """Return what goes into every file, as huggingface_hub divides tensors."""
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        nbytes = _nbytes(tensor)
        if nbytes > max_file_nbytes:
            shards.append([name])
            continue
        if filled + nbytes > max_file_nbytes:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    return [*shards, current] if current or not shards else shards


def _lay_out(file: str, tensors: Mapping[str, Tensor], places: dict[str, _Place]) -> bytes:
    """Place tensors in a file, wide dtypes first so that all lie aligned; return its header."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name in names:
        start, stop = stop, stop + _nbytes(tensors[name])
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    for name in names:
        shape, (offset, _) = tuple(tensors[name].shape), header[name]["data_offsets"]
        places[name] = _Place(file, start + offset, tensors[name].dtype, shape)
    return struct.pack("<Q", len(text)) + text


def _write(
    directory: Path,
    tensors: Mapping[str, Tensor],
    units: Sequence[Sequence[str]],
    convert: Convert,
    files: _Files,
    stem: str,
    ranks: ControlGroup,
) -> None:
    staging = directory / _STAGING
    failure: Exception | None = None
    for names in units:
        whole = {name: _whole(tensors[name]) for name in names}
        if ranks.rank != 0 or failure is not None:
            continue  # whoever fails still gathers with the others, who do not know of it
        try:
            _put(staging, convert(whole), files)
        except Exception as error:
            failure = error
    with AllOrNone(ranks):
        if failure is not None:
            shutil.rmtree(staging, ignore_errors=True)
            raise failure
        if ranks.rank == 0:
            _commit(directory, staging, files, stem)


def _begin(staging: Path, files: _Files) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for name, head in files.heads.items():
        (staging / name).write_bytes(head)


def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered from the ranks that hold it, on every rank."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor.detach() if gather is None else gather()
    return whole.detach()


def _put(staging: Path, tensors: Mapping[str, Tensor], files: _Files) -> None:
    for name, tensor in tensors.items():
        place = files.places.get(name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise CheckpointError(
                f"{name!r} was converted to {tensor.dtype} {tuple(tensor.shape)}, "
                f"planned as {place}"
            )
        with open(staging / place.file, "r+b") as stream:
            stream.seek(place.offset)
            for view in packed_chunks(tensor):
                stream.write(view)


def _commit(directory: Path, staging: Path, files: _Files, stem: str) -> None:
    index = f"{stem}.safetensors.index.json"
    for name in files.heads:
        with open(staging / name, "r+b") as stream:
            os.fsync(stream.fileno())
    kept = {*files.heads, *([] if files.index is None else [index])}
    for old in (*directory.glob(f"{stem}*.safetensors"), directory / index):
        if old.name not in kept and _is_ours(old.name, stem):
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
    for name in files.heads:
        os.rename(staging / name, directory / name)
    if files.index is not None:  # last: a directory with one is complete
        (staging / index).write_text(files.index, encoding="utf-8")
        os.rename(staging / index, directory / index)
    shutil.rmtree(staging, ignore_errors=True)
    sync_directory(directory)


def _is_ours(name: str, stem: str) -> bool:
    rest = name.removeprefix(stem)
    numbered = len(rest) == len("-00001-of-00002.safetensors") and rest[6:10] == "-of-"
    return rest in (".safetensors", ".safetensors.index.json") or numbered
