"""A model from what is typed: a HuggingFace config, or a function of one's own."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vescale_deferred import deferred_init

from .command import CommandError


def deferred_model(source: str) -> nn.Module:
    """Return a model without memory.

    Args:
        source: ``module:factory`` or ``file.py:factory``; a directory with a ``config.json``, a
            JSON file, or the name of a model on the HuggingFace hub.

    Raises:
        CommandError: If there is no such thing, or its constructor raised.
    """
    factory = model_factory(source)
    try:
        return deferred_init(factory)
    except Exception as error:
        raise CommandError(
            f"constructing {source!r} raised {type(error).__name__}: {error}; expected a function "
            "or class that takes no arguments and returns a module (--debug says where it raised)"
        ) from error


def model_factory(source: str) -> Callable[[], Any]:
    """Return what constructs a model; see :func:`deferred_model`.

    Raises:
        CommandError: If there is no such thing.
    """
    return function_of(source) if is_function(source) else _huggingface_factory(source)


def is_function(source: str) -> bool:
    """Whether text names a function in a module or a file rather than a model of the hub."""
    return ":" in source


def function_of(source: str) -> Callable[[], Any]:
    """Return the function, class or object that ``module:name`` or ``file.py:name`` names.

    Raises:
        CommandError: If there is none.
    """
    where, _, name = source.rpartition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(module).items() if callable(value)]
            near = difflib.get_close_matches(name, public, n=3, cutoff=0.5) or public[:8]
            raise CommandError(f"{where} has no {name!r}; it has {', '.join(near) or 'nothing'}")
        found = getattr(found, part)
    return found


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError(f"expected a Python file, got {str(path)!r}, which is not there")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As python file.py would: it may import what lies beside it.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CommandError(
            f"running {path} raised {type(error).__name__}: {error}; put what trains under "
            "if __name__ == '__main__': (--debug says where it raised)"
        ) from error
    return module


def _from_path(where: str) -> ModuleType:
    # The folder that the command runs in is where a module of one's own is.
    sys.path.insert(0, "")
    try:
        return importlib.import_module(where)
    except ImportError as error:
        raise CommandError(
            f"cannot import {where!r}: {error}; expected module:factory with a module that "
            "Python finds from here, or file.py:factory"
        ) from error


def _huggingface_factory(source: str) -> Callable[[], nn.Module]:
    is_path = source.endswith(".json") or source.startswith((".", "/", "~"))
    if is_path and not Path(source).expanduser().exists():
        raise CommandError(
            f"expected a config.json or a directory with one, got {source!r}, which is not there"
        )
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise CommandError(
            f"found no config for {source!r}: expected a directory with a config.json, a JSON "
            "file, a model of the HuggingFace hub, or module:factory for a model of your own; "
            f"transformers says: {first}"
        ) from error
    return lambda: _model_class(transformers, config)(config)


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise CommandError(
            "a HuggingFace config needs transformers: pip install transformers; for a model of "
            "your own give module:factory or file.py:factory"
        ) from error
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return transformers


def _model_class(transformers: Any, config: Any) -> Callable[[Any], nn.Module]:
    """Return the class that the config names, else a causal language model, else the body."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM.from_config
    if type(config) in transformers.MODEL_MAPPING:
        return transformers.AutoModel.from_config
    raise CommandError(
        f"transformers has no model for a config of type {config.model_type!r}; give "
        "module:factory for a model of your own"
    )


def token_batch(rows: int, sequence_length: int) -> Mapping[str, torch.Tensor]:
    """Return a batch of a HuggingFace language model; its values do not matter."""
    ids = torch.zeros(rows, sequence_length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def random_token_batch(
    rows: int, sequence_length: int, vocab_size: int
) -> dict[str, torch.Tensor]:
    """Return a batch of a HuggingFace language model, the same each time."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (rows, sequence_length), generator=generator)
    return {"input_ids": ids, "labels": ids}
