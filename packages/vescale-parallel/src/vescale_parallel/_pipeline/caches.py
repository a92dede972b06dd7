"""Caches of keys and values: a pipeline keeps none, since every stage would have a part of one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def refuse_caches(model: nn.Module) -> None:
    """Have transformers' models make no cache under a pipeline, and refuse one that is given."""
    if hasattr(getattr(model, "config", None), "use_cache"):
        names = list(inspect.signature(model.forward).parameters)
        if "use_cache" in names:
            hook = functools.partial(_without_cache, names)
            model.register_forward_pre_hook(hook, with_kwargs=True)
            return
    for child in model.children():
        refuse_caches(child)


def _without_cache(
    names: Sequence[str], module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if given.get("use_cache") or given.get("past_key_values") is not None:
        raise ValueError(
            "a pipeline keeps no cache of keys and values, of which every stage would have "
            "its own layers; expected use_cache=False and no past_key_values. "
            "model.generate(...) then computes all positions for every token: right, but slow. "
            "To generate much, model.save_pretrained(...) and load that without a pipeline"
        )
    return None if "use_cache" in given else (args, {**kwargs, "use_cache": False})
