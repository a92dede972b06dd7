"""Generation with an encoder: transformers calls that alone, and ranks have parts of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def encoders_by_calls(model: nn.Module) -> Iterator[None]:
    """Have ``get_encoder`` of a parallelized encoder-decoder return what calls the model.

    Ranks have parts of an encoder, which come together in a call of the model.
    """
    owners = [each for each in model.modules() if _has_encoder(each)]
    try:
        for owner in owners:
            object.__setattr__(owner, "get_encoder", _Getter(model, owner))
        yield
    finally:
        for owner in owners:
            object.__delattr__(owner, "get_encoder")


def _has_encoder(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return bool(
        getattr(config, "is_encoder_decoder", False)
        and hasattr(type(module), "get_encoder")
        and hasattr(module, "generation_config")
    )


class _Getter:
    """The method of one module."""

    def __init__(self, model: nn.Module, owner: nn.Module) -> None:
        cls: Any = type(owner)
        self._model, self._get = model, cls.get_encoder.__get__(owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _EncoderByCalls(self._model, self._get(*args, **kwargs))


# What an encoder returns, and what the model calls it.
_OF_MODELS = ("last_hidden_state", "hidden_states", "attentions")


class _EncoderByCalls:
    """Calls the whole model, with one token for the decoder, for what the encoder returns.

    Hidden states are those that the model returns, since ranks may have parts of them inside of
    it. What the encoder returns besides, a mask of its positions for example, is its own.
    """

    def __init__(self, model: nn.Module, encoder: nn.Module) -> None:
        self._model, self._encoder = model, encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def __call__(self, **given: Any) -> Any:
        rows = next(each for each in given.values() if isinstance(each, Tensor))
        token = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
        outputs: list[Any] = []
        hook = self._encoder.register_forward_hook(lambda *called: outputs.append(called[-1]))
        try:
            made = self._model(**given, decoder_input_ids=token, use_cache=False)
        finally:
            hook.remove()
        of_model = {name: made.get(f"encoder_{name}") for name in _OF_MODELS}
        return _with_fields(outputs[-1] if outputs else None, of_model)


def _with_fields(output: Any, fields: Mapping[str, Any]) -> Any:
    """Return an encoder's output, of its own kind, with these fields in place of its own."""
    kinds = import_module("transformers.modeling_outputs")
    if not isinstance(output, kinds.ModelOutput):
        return kinds.BaseModelOutput(**fields)
    return type(output)(**{**output, **fields})
