"""Micro-batches: the equal chunks of a batch that a pipeline runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vescale_parallel._cross_replica.borders import Rows, part_of_rows
from vescale_parallel._model.inputs import batch_dims
from vescale_parallel._torch_private import pytree


def split_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_microbatches: int,
    rows: Sequence[Rows | None] | None = None,
    *,
    asked_by: str = "pipeline_parallel.microbatches",
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Split a batch into micro-batches; tensors without rows go to every one.

    ``rows`` says where the rows are in every leaf, None for what :func:`batch_dims` says;
    ``asked_by`` is the key of the plan, for errors.

    Raises:
        ValueError: If there is no tensor, or its rows do not divide into them.
    """
    pairs, spec = _located(args, kwargs, rows)
    num_rows = _num_rows(pairs)
    if num_rows is None or num_rows % num_microbatches:
        raise ValueError(
            f"expected a batch whose rows divide into {num_microbatches} micro-batches "
            f"({asked_by}), got {num_rows} rows"
        )

    def rows_of(x: Any, at: Rows | None, index: int) -> Any:
        return x if at is None else part_of_rows(x, at, index, num_microbatches, num_rows)

    cut = [[rows_of(x, at, index) for x, at in pairs] for index in range(num_microbatches)]
    return [pytree.tree_unflatten(each, spec) for each in cut]


def num_rows_of(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rows: Sequence[Rows | None] | None = None,
) -> int | None:
    """Return how many rows a batch has, None if no tensor has any; see :func:`split_batch`."""
    return _num_rows(_located(args, kwargs, rows)[0])


def _located(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Sequence[Rows | None] | None
) -> tuple[list[tuple[Any, Rows | None]], Any]:
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    if rows is None or not any(rows):
        rows = [None if dim is None else Rows(dim) for dim in batch_dims(leaves)]
    return list(zip(leaves, rows, strict=True)), spec


def _num_rows(pairs: Sequence[tuple[Any, Rows | None]]) -> int | None:
    # Where rows share a dim with something else it is longer.
    return min((x.shape[at.dim] for x, at in pairs if at is not None), default=None)
