"""``save_pretrained`` of a parallelized model: every rank calls it, rank 0 writes."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import announced_failures

from ._export import write_config, write_model
from ._told import told_to_exporters
from ._transformers import is_transformers_model

_IGNORED = ("is_main_process", "safe_serialization")  # rank 0 writes, and safetensors


def give_save_pretrained(model: nn.Module) -> None:
    """Have ``save_pretrained`` of a parallelized model gather what ranks hold, in place."""
    cls: Any = type(model)  # of this model alone
    original: Callable[..., None] | None = getattr(cls, "save_pretrained", None)
    if original is None:
        return
    if hasattr(model, "peft_config"):
        gathering = save_adapters
    elif is_transformers_model(model):
        gathering = _save
    else:
        return

    @functools.wraps(original)
    def save_pretrained(
        self: nn.Module, save_directory: str | os.PathLike[str], **options: Any
    ) -> None:
        gathering(functools.partial(original, self), self, save_directory, options)

    save_pretrained.gathers = True  # pyright: ignore[reportAttributeAccessIssue]: for export
    cls.save_pretrained = save_pretrained


def _save(
    original: Callable[..., None],
    model: nn.Module,
    path: str | os.PathLike[str],
    options: dict[str, Any],
) -> None:
    with told_to_exporters():
        max_shard_size = options.pop("max_shard_size", None) or _default_shard_size(model)
        original_format = options.pop("save_original_format", True)
        beside: Callable[[Path], None] = options.pop("beside", lambda directory: None)
        _check_options(options)
    write_model(
        model,
        path,
        max_shard_size,
        beside=functools.partial(write_config, original, beside),
        original_format=original_format,
    )


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _IGNORED and value not in (None, False):
            raise ValueError(
                f"save_pretrained of a parallelized model does not take {name}={value!r}: every "
                "rank calls save_pretrained(path, max_shard_size=...), and rank 0 writes tensors "
                "as they are gathered. For anything else load what it wrote on one device"
            )


def _default_shard_size(model: nn.Module) -> int | str:
    """Return the default of transformers, which a ``save_pretrained`` around its own hides."""
    for cls in type(model).__mro__:
        method = vars(cls).get("save_pretrained")
        parameters = {} if method is None else inspect.signature(method).parameters
        if "max_shard_size" in parameters:
            return parameters["max_shard_size"].default
    raise AssertionError("PreTrainedModel.save_pretrained takes max_shard_size")


def save_adapters(
    original: Callable[..., None],
    model: nn.Module,
    path: str | os.PathLike[str],
    options: dict[str, Any],
) -> None:
    """Write the adapters of PEFT, which are small: gathered whole, and written by rank 0."""
    adapters: Any = getattr(model, "peft_config", {})
    embeds = options.get("save_embedding_layers") is True
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    whole: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        is_adapter = any(adapter in parts for adapter in adapters) or "lora_" in name
        if name in trained or is_adapter or (embeds and "embed" in name) or "head" in parts[-2:]:
            gather = getattr(tensor, "full_tensor", None)
            whole[name] = (tensor if gather is None else gather()).detach().cpu()
    rank = dist.get_rank() if dist.is_initialized() else 0
    with announced_failures():
        if rank == 0:
            original(path, **{**options, "state_dict": whole})
        if dist.is_initialized():
            dist.barrier()
