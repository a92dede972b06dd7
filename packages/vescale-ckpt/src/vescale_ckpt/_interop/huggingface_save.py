"""Write a sharded model as HuggingFace's libraries lay one out, one tensor after the other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vescale_ckpt._comm.control_group import AllOrNone, ControlGroup, current_control_group
from vescale_ckpt._comm.options import check_same_options
from vescale_ckpt._format.dtypes import DTYPES, NAMES
from vescale_ckpt._format.file_layout import FilePlan, PlannedFile, TensorInfo, file_names, lay_out
from vescale_ckpt._io.buffer_pool import Scratch
from vescale_ckpt._io.object_store import absolute_path
from vescale_ckpt._io.tensor_bytes import packed_chunks
from vescale_ckpt._store.atomic_directory import sync_directory
from vescale_ckpt.exceptions import CheckpointError

from .gather import gathered

Convert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

# How long a rank waits for the others to come; a call on one rank alone ends then, with an error.
_TIMEOUT = timedelta(minutes=5)
_STAGING = ".vescale-export"


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

    Every rank of the default process group must call this. Tensors are gathered one by one in host
    memory and written by rank 0, which never holds more than the largest of them besides its
    shards. Files are those that HuggingFace's libraries would write of the same tensors, in the
    same order. They appear when all are written, and replace those of a model that was there.

    Args:
        directory: Where to write; made if there is none. Shared with rank 0 only.
        tensors: What to write, by name, the same on every rank. Tied ones are written twice.
        convert: Given whole tensors by name, returns what to write of them; called on rank 0 with
            tensors in host memory, and on every rank with some on the meta device.
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
            _check_tensors(tensors)
            units = _units(tensors, together)
            convert = convert or dict
            plan = _plan(tensors, units, convert, max_file_nbytes, stem, dict(metadata or {}))
            given = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors.values()]
            digest = sha256(repr((units, given, plan)).encode()).hexdigest()
            step.message = [digest, {"stem": stem, "max_file_nbytes": max_file_nbytes}]
            target = absolute_path(directory)
        check_same_options([options for _, options in step.messages], ranks)
        if len({digest for digest, _ in step.messages}) > 1:
            raise ranks.common(
                CheckpointError("ranks were given other tensors to write: names, shapes or dtypes")
            )
        with AllOrNone(ranks):
            if ranks.rank == 0:
                _begin(target / _STAGING, plan)
                if beside is not None:
                    beside(target)
        _write(target, tensors, units, convert, plan, stem, ranks)


def _check_tensors(tensors: object) -> None:
    if not isinstance(tensors, Mapping):
        remedy = "pass its state_dict()" if isinstance(tensors, torch.nn.Module) else "name them"
        raise CheckpointError(
            f"expected a dict of tensors by name, got a {type(tensors).__name__}; {remedy}"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name!r} is a {type(tensor).__name__}, and HuggingFace's files hold tensors "
                "only; leave it out"
            )


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
) -> FilePlan:
    """Lay out the files, the index last if there is one."""
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
    plan = FilePlan(files={}, tensors={})
    table = [_info(name, tensor) for name, tensor in found.items()]
    shards = _split(table, max_file_nbytes)
    for file, shard in zip(file_names(stem, len(shards)), shards, strict=True):
        # Wide dtypes first, so that all lie aligned.
        ordered = sorted(shard, key=lambda info: (-DTYPES[info.dtype].itemsize, info.name))
        lay_out(file, [[info] for info in ordered], plan, alignment=8)
    if len(shards) > 1:
        total = sum(info.nbytes for info in table)
        weight_map = {name: plan.tensors[name].file for name in found}
        index = {"metadata": metadata | {"total_size": total}, "weight_map": weight_map}
        text = f"{json.dumps(index, indent=2, sort_keys=True)}\n".encode()
        plan.files[f"{stem}.safetensors.index.json"] = PlannedFile(head=text, nbytes=len(text))
    return plan


def _info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, "", name, NAMES[tensor.dtype], tuple(tensor.shape))


def _split(table: Sequence[TensorInfo], max_file_nbytes: int) -> list[list[TensorInfo]]:
    """Return what goes into every file, as huggingface_hub divides tensors."""
    shards: list[list[TensorInfo]] = []
    current: list[TensorInfo] = []
    filled = 0
    for info in table:
        if info.nbytes > max_file_nbytes:
            shards.append([info])
            continue
        if filled + info.nbytes > max_file_nbytes:
            shards.append(current)
            current, filled = [], 0
        current.append(info)
        filled += info.nbytes
    return [*shards, current] if current or not shards else shards


def _write(
    directory: Path,
    tensors: Mapping[str, Tensor],
    units: Sequence[Sequence[str]],
    convert: Convert,
    plan: FilePlan,
    stem: str,
    ranks: ControlGroup,
) -> None:
    staging, scratch = directory / _STAGING, Scratch()
    try:
        for names in units:
            whole = gathered(names, tensors, ranks, scratch)
            if ranks.rank == 0:
                _put(staging, convert(whole), plan)
        with AllOrNone(ranks):
            if ranks.rank == 0:
                _commit(directory, staging, plan, stem)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _begin(staging: Path, plan: FilePlan) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for name, file in plan.files.items():
        (staging / name).write_bytes(file.head)


def _put(staging: Path, tensors: Mapping[str, Tensor], plan: FilePlan) -> None:
    for name, tensor in tensors.items():
        place, found = plan.tensors.get(name), (NAMES.get(tensor.dtype), tuple(tensor.shape))
        if place is None or (place.dtype, place.shape) != found:
            planned = "nothing" if place is None else f"{DTYPES[place.dtype]} {place.shape}"
            raise CheckpointError(
                f"convert made {tensor.dtype} {found[1]} of {name!r}, and on the meta device "
                f"{planned}; it must return the same names, dtypes and shapes for both"
            )
        with open(staging / place.file, "r+b") as stream:
            stream.seek(place.offset)
            for view in packed_chunks(tensor):
                stream.write(view)


def _commit(directory: Path, staging: Path, plan: FilePlan, stem: str) -> None:
    for name in plan.files:
        with open(staging / name, "r+b") as stream:
            os.fsync(stream.fileno())
    index = directory / f"{stem}.safetensors.index.json"
    for old in (*directory.glob(f"{stem}*.safetensors"), index):
        if old.name not in plan.files and _is_ours(old.name, stem):
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
    for name in plan.files:  # the index last: a directory with one is complete
        os.rename(staging / name, directory / name)
    shutil.rmtree(staging, ignore_errors=True)
    sync_directory(directory)


def _is_ours(name: str, stem: str) -> bool:
    rest = name.removeprefix(stem)
    numbered = len(rest) == len("-00001-of-00002.safetensors") and rest[6:10] == "-of-"
    return rest in (".safetensors", ".safetensors.index.json") or numbered
