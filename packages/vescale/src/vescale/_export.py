"""Models to HuggingFace's directories and back, under any plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import vescale_ckpt
import vescale_deferred

from ._told import told_to_exporters, told_to_loaders
from ._transformers import (
    conversion,
    is_transformers_model,
    kept_names,
    names_of_files,
    optional_names,
)

_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model as HuggingFace lays one out. Every rank must call this.

    ``model.safetensors``, or numbered files with an index, that any program reads. Of a model of
    transformers also ``config.json`` and the like, so that ``from_pretrained(path)`` loads it;
    names, ties and files are those of its own ``save_pretrained`` on one device. Tensors are
    gathered one by one, and rank 0 writes.

    Args:
        model: Parallelized under any plan, or not at all.
        path: A directory; a model that is there is replaced.
        tokenizer: Anything with ``save_pretrained``, written beside the model.
        max_shard_size: When to begin another file: bytes, or ``"5GB"``, ``"200MB"``.

    Raises:
        vescale.CheckpointError: On every rank, if it could not be written on one or a rank did
            not call this within five minutes.
        TypeError: If ``model`` is no module, or a deferred one. If that is so on some ranks, the
            others raise a CheckpointError that names them.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as path:
        ...     export(torch.nn.Linear(4, 2), path)
        ...     sorted(os.listdir(path))
        ['model.safetensors']
    """
    with told_to_exporters():
        _check_model(model, "export")
        has_config = is_transformers_model(model)

    def beside(directory: Path) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)

    save: Any = getattr(model, "save_pretrained", None)
    if save is None or not has_config:
        write_model(model, path, max_shard_size, beside=beside)
        return
    # Of a parallelized model this gathers; see give_save_pretrained.
    if getattr(save, "gathers", False):
        save(path, max_shard_size=max_shard_size, beside=beside)
        return
    write_model(model, path, max_shard_size, beside=functools.partial(write_config, save, beside))


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    only: Iterable[str] | None = None,
) -> None:
    """Fill a model with the values of a HuggingFace directory. Every rank must call this.

    Every rank reads the bytes of its own shards, and nobody holds all of the model. Names are
    matched as ``from_pretrained`` does: with or without the prefix of the base model, legacy names
    renamed, tied weights once. Values are converted to the dtype that the model has.

    Args:
        model: Parallelized under any plan, or on one device.
        path: A directory with ``model.safetensors`` or its index, or a single file.
        strict: Whether names that only the files or only the model has are an error. What a model
            of transformers says may be missing (positions that are sines) keeps its values.
        only: What of the model to fill, as regular expressions for whole names in it; what lies
            below a name that matches counts, too. The rest, a new head for example, keeps its
            values.

    Raises:
        vescale.CheckpointError: On every rank, if files are missing or damaged, names or shapes
            do not fit, or ``only`` is no list of regular expressions.
        TypeError: If ``model`` is no module, or a deferred one. If that is so on some ranks, the
            others raise a CheckpointError that names them.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as path:
        ...     export(torch.nn.Linear(4, 2), path)
        ...     load_pretrained(torch.nn.Linear(4, 2), path)
    """
    with told_to_loaders():
        _check_model(model, "load_pretrained")
        is_known = is_transformers_model(model)
        rename = names_of_files(model) if is_known else None
        optional = optional_names(model) if is_known else _is_never_optional
    vescale_ckpt.load_safetensors(
        path, model, rename=rename, strict=strict, optional=optional, only=only
    )


def _is_never_optional(name: str) -> bool:
    return False


def write_config(
    save: Callable[..., None], beside: Callable[[Path], None], directory: Path
) -> None:
    """Write what belongs to a model of transformers but its tensors.

    Args:
        save: Its own ``save_pretrained``.
        beside: Writes what else there is.
        directory: Where.
    """
    save(directory, state_dict={})  # no tensors: configurations, and code of custom models
    beside(directory)


def write_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    max_shard_size: int | str,
    *,
    beside: Callable[[Path], None],
    original_format: bool = True,
) -> None:
    """Gather the tensors of a model one by one, and write them on rank 0.

    Args:
        model: Any module.
        path: The directory.
        max_shard_size: When to begin another file.
        beside: Writes what else there is; called on rank 0 alone.
        original_format: Whether to write the layout of the hub where transformers has another.
    """
    with told_to_exporters():
        tensors = _state_of(model)
        convert, order, together = None, [*tensors], list[list[str]]()
        metadata: dict[str, Any] = {}
        if is_transformers_model(model):
            if original_format:
                convert, order, together = conversion(model, tensors)
            metadata["total_parameters"] = sum(p.numel() for p in model.parameters())
        max_file_nbytes = _nbytes(max_shard_size)
    vescale_ckpt.save_safetensors(
        path,
        {name: tensors[name] for name in order},
        convert=convert,
        together=together,
        max_file_nbytes=max_file_nbytes,
        metadata=metadata,
        beside=beside,
    )


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors to write, by name, tied ones once."""
    named: list[tuple[str, Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    identities = {name: id(tensor) for name, tensor in named}
    state = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    names = {name: identities.get(name, id(tensor)) for name, tensor in state.items()}
    if is_transformers_model(model):
        return {name: state[name] for name in kept_names(model, names)}
    first = {tied: name for name, tied in reversed(names.items())}
    return {name: state[name] for name, tied in names.items() if first[tied] == name}


def _check_model(model: object, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: expected a module, got {type(model).__name__}")
    if vescale_deferred.is_deferred(model):
        raise TypeError(
            f"{function}: expected a model with values, got a deferred one; give it to "
            "vescale.parallelize first, or to vescale_deferred.materialize"
        )


def _nbytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    for unit, factor in _UNITS.items():
        number = size.upper().removesuffix(unit).strip()
        if size.upper().endswith(unit) and number.replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise ValueError(f"expected max_shard_size as bytes or like '5GB' or '200MB', got {size!r}")
