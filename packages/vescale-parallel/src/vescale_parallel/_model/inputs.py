"""A small batch to run a model on: cut from a given one, or made up for a known kind of model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from vescale_parallel._torch_private import pytree

_ROWS, _LENGTH = 2, 16


def example_from(dataset: Any) -> Any:
    """Return two samples of a map-style data set as a batch, None of others."""
    if isinstance(dataset, DataLoader | IterableDataset) or not hasattr(dataset, "__getitem__"):
        return None
    return default_collate([dataset[0], dataset[min(1, len(dataset) - 1)]])


def small_example(batch: Any) -> Any:
    """Return the first rows of a batch, and the first positions if all its tensors are (B, S)."""
    if isinstance(batch, Mapping):
        batch = dict(batch)  # pytree does not open every mapping
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
    if not tensors or len({x.shape[0] for x in tensors}) > 1:
        return batch
    length = common_length(batch, tensors[0].shape[0])

    def small(x: Tensor) -> Tensor:
        rows = x[:_ROWS]
        return some_that_count(rows[:, :length] if length is not None and x.dim() == 2 else rows)

    return pytree.tree_map_only(Tensor, lambda x: small(x) if x.dim() else x, batch)


def some_that_count(x: Tensor) -> Tensor:
    """Return targets, of which some are not ignored: of a long prompt the first ones all are."""
    if x.is_floating_point() or x.is_complex() or not x.numel() or not bool((x < 0).all()):
        return x
    counting = x.clone()
    counting[..., ::2] = 0  # the next ones stay, and are ignored
    return counting


def common_length(batch: Any, num_rows: int) -> int | None:
    """Return a short length if a batch is of integers (B, S), all as long; None if it is not."""
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
    flat = all(x.dim() <= 2 and x.shape[0] == num_rows for x in tensors)
    same_length = len({x.shape[1] for x in tensors if x.dim() == 2}) == 1
    ids = all(not x.is_floating_point() for x in tensors)
    return _LENGTH if flat and same_length and ids else None


def example_of(model: nn.Module) -> dict[str, Tensor] | None:
    """Return what a transformers model takes, by its configuration; None for other models."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if config is None or not isinstance(main, str):
        return None
    if main == "input_ids":
        ids_BS = torch.arange(_ROWS * _LENGTH).view(_ROWS, _LENGTH) % _vocabulary(model)
        both = getattr(config, "is_encoder_decoder", False)
        return {main: ids_BS, "decoder_input_ids": ids_BS} if both else {main: ids_BS}
    if main == "pixel_values":
        side = config.image_size
        height, width = (side, side) if isinstance(side, int) else side
        return {main: torch.zeros(_ROWS, config.num_channels, height, width)}
    return None


def _vocabulary(model: nn.Module) -> int:
    embed = cast("Any", model).get_input_embeddings()
    return math.prod(embed.weight.shape[:1]) if embed is not None else 2
