"""What transformers' models return of all layers, which no rank of a pipeline has.

Caches of keys and values are not made: every stage would have its own layers of one. Hidden states
and attentions of all layers are refused: those of other stages would silently be left out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def give_no_layers(model: nn.Module) -> None:
    """Have transformers' models make no cache under a pipeline; refuse what every layer gives."""
    if hasattr(getattr(model, "config", None), "output_hidden_states"):
        names = list(inspect.signature(model.forward).parameters)
        hook = functools.partial(_without_layers, names)
        model.register_forward_pre_hook(hook, with_kwargs=True)
        return
    for child in model.children():
        give_no_layers(child)


def _without_layers(
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
    for option in ("output_hidden_states", "output_attentions"):
        asked = given.get(option)
        if asked or (asked is None and getattr(module.config, option, False)):
            raise ValueError(
                f"expected {option}=False under a pipeline, got True: every stage would return "
                "those of its own layers only; use pipeline_parallel.size 1 for them"
            )
    makes_cache = "use_cache" in names and given.get("use_cache") is None
    return (args, {**kwargs, "use_cache": False}) if makes_cache else None
