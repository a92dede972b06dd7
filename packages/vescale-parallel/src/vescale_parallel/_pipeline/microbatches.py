"""Micro-batches: the chunks of a batch that a pipeline runs, equal as far as its rows are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._cross_replica.borders import Rows
from vescale_parallel._cross_replica.dims.bounds import bounds_within
from vescale_parallel._loss.output import mean_of_parts
from vescale_parallel._model.inputs import batch_dims, refuse_closed_batch
from vescale_parallel._torch_private import pytree


def split_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_microbatches: int,
    rows: Sequence[Rows | None] | None = None,
    *,
    asked_by: str = "pipeline_parallel.microbatches",
    may_be_uneven: bool = False,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Split a batch into micro-batches; tensors without rows go to every one.

    ``rows`` says where the rows are in every leaf, None for what :func:`batch_dims` says;
    ``asked_by`` is the key of the plan, for errors. With ``may_be_uneven`` micro-batches have the
    rows that :func:`rows_of_parts` says.

    Raises:
        ValueError: If there is no tensor, or its rows do not divide into them; with
            ``may_be_uneven``, if there are fewer of them.
        TypeError: If objects that pytree does not open hold all tensors.
    """
    pairs, spec = _located(args, kwargs, rows)
    num_rows = _num_rows(pairs)
    if num_rows is None:
        refuse_closed_batch((args, kwargs))
    if may_be_uneven and (num_rows or 0) < num_microbatches:
        raise ValueError(
            f"expected a batch of at least {num_microbatches} rows, one for each micro-batch "
            f"({asked_by}), got {num_rows} rows; leave such a batch out (drop_last=True), or ask "
            "for fewer micro-batches"
        )
    if not num_rows or (num_rows % num_microbatches and not may_be_uneven):
        raise ValueError(
            f"expected a batch whose rows divide into {num_microbatches} micro-batches "
            f"({asked_by}), got {num_rows} rows"
        )
    sizes = rows_of_parts(num_rows, num_microbatches)
    starts = itertools.accumulate(sizes, initial=0)
    cut = [
        [x if at is None else _part(x, at, start, size, num_rows) for x, at in pairs]
        for start, size in zip(starts, sizes, strict=False)
    ]
    return [pytree.tree_unflatten(each, spec) for each in cut]


def _part(x: Tensor, at: Rows, start: int, size: int, num_rows: int) -> Tensor | None:
    part = rows_within(x, at, start, size, num_rows)
    return None if at.is_optional and not part.numel() and x.numel() else part


def rows_of_parts(num_rows: int, num_parts: int) -> list[int]:
    """Return the rows of parts of a batch: as many in all, or one more in the first ones.

    Example:
        >>> rows_of_parts(7, 4)
        [2, 2, 2, 1]
    """
    few, more = divmod(num_rows, num_parts)
    return [few + (index < more) for index in range(num_parts)]


def rows_within(whole: Tensor, rows: Rows, start: int, size: int, num_rows: int) -> Tensor:
    """Return ``size`` of the rows of a tensor, which has ``num_rows``, from ``start`` on.

    Raises:
        ValueError: If it has not as many elements of every row, and it is not known how many.
    """
    if whole.is_nested:
        return torch.nested.as_nested_tensor(
            [*whole.unbind()][start : start + size], layout=whole.layout
        )
    if rows.bounds:
        return bounds_within(whole, rows.bounds, start, size)
    if rows.lengths:
        before, inside = sum(rows.lengths[:start]), sum(rows.lengths[start : start + size])
        return whole.narrow(rows.dim, before, inside)
    if whole.shape[rows.dim] % num_rows:
        raise ValueError(
            f"expected a tensor with as many elements of every row, got shape "
            f"{tuple(whole.shape)} for {num_rows} rows in its dim {rows.dim}. If it packs what "
            "rows have, images for example, name the token that stands for them in the texts "
            "(model.config.image_token_id)"
        )
    if rows.outermost:
        inside = whole.shape[rows.dim] // num_rows
        return whole.narrow(rows.dim, start * inside, size * inside)
    apart = whole.unflatten(rows.dim, (-1, num_rows)).narrow(rows.dim + 1, start, size)
    return apart.flatten(rows.dim, rows.dim + 1)


@dataclass(frozen=True)
class Parts:
    """Micro-batches of one rank, and how they weigh in means over the global batch.

    Attributes:
        num_ranks: Data-parallel ranks, which have as many rows each.
        sizes: Rows of the micro-batches.
    """

    num_ranks: int
    sizes: Sequence[int]

    @property
    def shares(self) -> list[float] | None:
        """Of the rank's rows, that every micro-batch has; None if it is the same."""
        if len({*self.sizes}) == 1:
            return None
        return [size / sum(self.sizes) for size in self.sizes]

    def num_like(self, index: int) -> float:
        """Return how many parts as large as a micro-batch the global batch is in."""
        shares = self.shares
        return self.num_ranks * (len(self.sizes) if shares is None else 1 / shares[index])

    def mean(self, scalars: Sequence[Tensor], total: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mean of a scalar of the micro-batches; ``total`` sums over ranks."""
        return mean_of_parts(scalars, total, self.num_ranks * len(self.sizes), self.shares)


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
    of_packed = [len(at.lengths) for _, at in pairs if at is not None and at.lengths]
    of_dims = [at.num_rows(x) for x, at in pairs if at is not None and not at.lengths]
    return min(of_packed or of_dims, default=None)
