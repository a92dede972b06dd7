"""Micro-batches: the equal chunks of a batch that a pipeline runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vescale_parallel._torch_private import pytree


def split_batch(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], num_parts: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Split a batch into micro-batches along dim 0 of its tensors.

    A tensor is cut if its dim 0 has the size of the first tensor's; others go to every part.

    Raises:
        ValueError: If there is no tensor, or its rows do not divide into the parts.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    rows = next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.ndim), None)
    if rows is None or rows % num_parts:
        raise ValueError(
            f"expected a batch whose rows divide into {num_parts} micro-batches "
            f"(pipeline_parallel.microbatches), got {rows} rows"
        )
    step = rows // num_parts
    parts: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for index in range(num_parts):
        cut = [
            x[index * step : (index + 1) * step]
            if isinstance(x, Tensor) and x.ndim and x.shape[0] == rows
            else x
            for x in leaves
        ]
        parts.append(pytree.tree_unflatten(cut, spec))
    return parts
