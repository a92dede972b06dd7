"""Fill a sharded model from safetensors files that somebody else has written."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from vescale_ckpt._comm.control_group import AllOrNone, current_control_group
from vescale_ckpt._comm.hosts import this_host
from vescale_ckpt._format.file_layout import StoredTensor
from vescale_ckpt._format.manifest import Manifest, StoredFile, is_file_name
from vescale_ckpt._format.safetensors import read_header
from vescale_ckpt._format.state_tree import Json, reference_to
from vescale_ckpt._format.strict_json import strict_json
from vescale_ckpt._io.file_handles import kind_of_special
from vescale_ckpt._io.object_store import absolute_path
from vescale_ckpt._load.fill import fill
from vescale_ckpt._load.match import Matched, match
from vescale_ckpt._load.read_items import read_items_of
from vescale_ckpt._load.shared_memory import apart, settle
from vescale_ckpt._state.arguments import checked
from vescale_ckpt._state.key_filter import key_filter_of, renamed
from vescale_ckpt._state.local_shards import local_shard_of
from vescale_ckpt._store.reader import CheckpointReader
from vescale_ckpt.exceptions import CheckpointError, CorruptCheckpointError

# No checksums depend on it: what ranks divide among themselves when they read.
_BLOCK_NBYTES = 1 << 20
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_safetensors(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    rename: Mapping[str, str] | Callable[[Sequence[str]], Mapping[str, str | None]] | None = None,
    strict: bool = True,
    optional: Callable[[str], bool] = lambda name: False,
    only: Iterable[str] | None = None,
) -> None:
    r"""Read HuggingFace safetensors files into a module, sharded or not.

    Every rank of the default process group must call this. Parameters and buffers are filled in
    place, each rank reading the bytes of its own shards, and converted if their dtype is another
    than the files'. These files have no checksums: what is damaged within a tensor is not noticed.

    Args:
        path: A safetensors file, or a directory with ``model.safetensors`` or with
            ``model.safetensors.index.json`` and the files named there.
        model: What to fill.
        rename: Regular expressions for whole names in the files, and what to call such a tensor
            here (``\1`` stands for the first group). The first that matches counts. Or a function
            that, given all names in the files, says what tensors are called here, None to leave
            one out; those that it does not mention keep their names.
        strict: Whether names that only the files or only ``model`` has are an error. A tensor
            that is missing in the files but tied to one that is there is never an error.
        optional: Says of a name here whether the files may lack it even so.
        only: What of ``model`` to fill, as regular expressions for whole names here; what lies
            below a name that matches counts, too. The rest stays as it is.

    Raises:
        CheckpointError: If ``model`` is no module, or ``only`` no list of regular expressions.
        CorruptCheckpointError: If the files are incomplete or make no sense.
        MismatchError: If names or shapes do not fit.
    """
    ranks = current_control_group()
    with ExitStack() as opened, ranks.together(), torch.no_grad():
        with AllOrNone(ranks) as step:
            _check_module(model)
            key_filter = checked(partial(key_filter_of, only, None))
            files = open_safetensors(absolute_path(path), rename or dict[str, str]())
            reader = opened.enter_context(files)
            step.message = this_host()
        with AllOrNone(ranks):
            state = model.state_dict()
            state = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            try:
                matched = match(
                    state,
                    reader.manifest,
                    ranks.rank,
                    strict=False,
                    cast=True,
                    key_filter=key_filter,
                )
                _forgive_ties(matched, state, ranks.rank, _tied(model, reader.manifest.tensors))
                matched.missing = [key for key in matched.missing if not optional(key)]
                matched.complain(strict=strict)
            except CheckpointError as error:
                raise type(error)(f"cannot load {reader.path}:\n{error}") from error
            items = read_items_of(reader.manifest, matched.targets)
            twins = apart(items)
        matched.report(strict=strict)
        with AllOrNone(ranks), ranks.together():
            fill(reader, items, ranks, step.messages)
            settle(twins)


def _check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(
            f"expected model to be an nn.Module, got {type(model).__name__}; for a dict of "
            "tensors use import_safetensors(path, checkpoint) and load(checkpoint, {'model': ...})"
        )


def _tied(model: torch.nn.Module, stored: Collection[str]) -> set[str]:
    """Return the names of tensors that the files have under another one of their names."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    there = {id(tensor) for name, tensor in named if name in stored}
    return {name for name, tensor in named if id(tensor) in there}


def _forgive_ties(
    matched: Matched, state: Mapping[str, torch.Tensor], rank: int, tied: Collection[str]
) -> None:
    filled = {shard.identity for shard, _ in matched.targets} - {None}
    matched.missing = [
        key
        for key in matched.missing
        # Memory does not tell of a rank that holds nothing of them, another pipeline stage.
        if key not in tied and local_shard_of(key, state[key], rank).identity not in filled
    ]


def open_safetensors(
    path: Path,
    rename: Mapping[str, str] | Callable[[Sequence[str]], Mapping[str, str | None]],
    *,
    below: str = "",
) -> CheckpointReader:
    """Open safetensors files as a checkpoint without checksums.

    Args:
        path: A file, or a directory as for :func:`load_safetensors`.
        rename: Rules for the names, or a function as for :func:`load_safetensors`.
        below: The top-level key that is to hold the tensors; empty for none.
    """
    directory = path if path.is_dir() else path.parent
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    tree: dict[str, Json] = {}
    found: list[tuple[str, StoredTensor]] = []
    for file, names in _files(path).items():
        if not is_file_name(file):
            raise CorruptCheckpointError(f"{path}: {file!r} is no file name of a checkpoint")
        stored = _read_header(directory / file)
        files[file] = StoredFile(nbytes=(directory / file).stat().st_size, checksums=())
        lacking = sorted((names or set()) - stored.keys())
        if lacking:
            raise CorruptCheckpointError(f"{directory / file} lacks tensor {lacking[0]!r}")
        found += stored.items()
    called = _called(rename, [name for name, _ in found])
    for name, tensor in found:
        key = called(name)
        if key is None:
            continue
        full = f"{below}.{key}" if below else key
        if full in tensors:
            raise CheckpointError(f"{path} has two tensors that are called {key!r} here")
        tensors[full] = tensor
        tree[key] = reference_to(full)
    if below:
        tree = {below: tree}
    manifest = Manifest(
        block_nbytes=_BLOCK_NBYTES, files=files, tensors=tensors, aliases={}, tree=tree
    )
    return CheckpointReader(directory, manifest, follow_links=True)


def _called(
    rename: Mapping[str, str] | Callable[[Sequence[str]], Mapping[str, str | None]],
    names: Sequence[str],
) -> Callable[[str], str | None]:
    if isinstance(rename, Mapping):
        return lambda name: renamed(name, rename)
    said = rename(names)
    return lambda name: said.get(name, name)


def _files(path: Path) -> dict[str, set[str] | None]:
    """Return the files to read, and the tensors that each must have."""
    if path.is_file():
        return {path.name: None}
    if (path / _SINGLE).exists():
        return {_SINGLE: None}
    if not (path / _INDEX).exists():
        raise CheckpointError(f"there is neither {_SINGLE} nor {_INDEX} in {path}")
    try:
        weights = strict_json((path / _INDEX).read_bytes())["weight_map"]
        files: dict[str, set[str] | None] = {}
        for name, file in weights.items():
            names = files.setdefault(str(file), set())
            assert names is not None
            names.add(name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path / _INDEX} makes no sense: {error!r}") from error
    return files


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        if (special := kind_of_special(file.resolve())) is not None:
            raise ValueError(f"it is {special}")
        nbytes = file.stat().st_size
        with open(file, "rb") as stream:
            number = stream.fileno()
            return read_header(file.name, nbytes, lambda at, length: os.pread(number, length, at))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{file} is missing") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{file} is no whole safetensors file: {error}") from error
