"""Batches whose rows have other numbers of images than others, of which losses are compared.

Rows made of one row have as many each; of these a mean over all images is the mean over rows. Of
rows that have not as many it is not, and no rank and no micro-batch knows how many others have.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.dims.row_counts import RowDims
from vescale_parallel._cross_replica.dims.rows_by_tokens import RowsByTokens, kept_tokens, one_row
from vescale_parallel._cross_replica.found import Given
from vescale_parallel._cross_replica.parts import NUM_PARTS, equal
from vescale_parallel._cross_replica.runs import Call, OtherCallsError, Run, run_module, seeded
from vescale_parallel._loss.output import is_loss
from vescale_parallel._model.inputs import has_dims
from vescale_parallel._model.leaf_names import leaf_names
from vescale_parallel._model.random_copies import in_double
from vescale_parallel._torch_private import pytree


def uneven_batches(given: Given, dims: RowDims) -> Iterator[list[Given]]:
    """Yield batches of four rows with both halves, of which the second has less in each row.

    First of two rows of a call, if some have other numbers of images, then of one with images and
    the same text without.
    """
    leaves, spec = pytree.tree_flatten(given)
    texts = next(rows.texts for _, rows in dims if isinstance(rows, RowsByTokens))
    counts = kept_tokens(leaves[texts], dims).sum(1).tolist()
    most, least = counts.index(max(counts)), counts.index(min(counts))
    row, where = one_row(leaves, dims, most)
    if counts[most] != counts[least]:
        other, _ = one_row(leaves, dims, least)
        yield [pytree.tree_unflatten(each, spec) for each in _batches(row, other, where, dims)]
    other = _without_images(row, where, texts, dims)
    if other is not None:
        yield [pytree.tree_unflatten(each, spec) for each in _batches(row, other, where, dims)]


def why_uneven(
    subject: nn.Module,
    whole: Given,
    halves: Sequence[Given],
    *,
    rows: bool = False,
    more: str = "images",
) -> str | None:
    """Return how a loss of all rows is no mean over halves; None if it is, or cannot be run.

    With ``rows``, also how results of rows are not those of both halves, one behind the other.
    ``more`` says what some rows have more of.
    """
    with warnings.catch_warnings(), seeded():
        warnings.simplefilter("ignore")
        run = run_module(subject, "", Call(*whole), [], NUM_PARTS)
        if run.error is not None:
            return None
        try:
            parts = [run_module(subject, "", Call(*half), run.counts, 1) for half in halves]
        except OtherCallsError:
            return None
    if any(part.error is not None for part in parts):
        return None
    losses, of_parts = _losses(run), [_losses(part) for part in parts]
    for name, loss in losses.items():
        found = [each[name] for each in of_parts if name in each]
        if len(found) < len(parts) or not equal(torch.stack(found).mean(), loss):
            return (
                f"it returns a number that is not a mean over rows where some have more {more}"
                f"{f', output{name}' if name else ''}"
            )
    return _why_rows_differ(run, parts) if rows else None


def _why_rows_differ(run: Run, parts: Sequence[Run]) -> str | None:
    for index, expected in enumerate(run.call.outputs):
        found = [part.call.outputs[index] for part in parts if index < len(part.call.outputs)]
        if len(found) < len(parts) or not all(map(has_dims, [expected, *found])):
            continue
        shapes = {(*x.shape[1:],) for x in [expected, *found]}
        if len(shapes) > 1 or not (
            equal(torch.cat(found), expected) or all(equal(x, expected) for x in found)
        ):
            return (
                f"rows of its result of shape {tuple(expected.shape)} depend on other rows, where "
                "some are longer"
            )
    return None


def _losses(run: Run) -> dict[str, Tensor]:
    leaves = pytree.tree_leaves(run.call.output)
    pairs = zip(leaf_names(run.call.output), leaves, strict=True)
    return {name: x for name, x in pairs if is_loss(x) and x.requires_grad}


def _batches(
    row: Sequence[Any], other: Sequence[Any], where: Sequence[int | None], dims: RowDims
) -> list[list[Any]]:
    """Return the leaves of two rows each, of both halves together and of each."""
    told = dict(dims)

    def joined(rows: Sequence[Sequence[Any]]) -> list[Any]:
        leaves: list[Any] = []
        for index, dim in enumerate(where):
            each = [
                in_double(x[index]) if isinstance(x[index], Tensor) else x[index] for x in rows
            ]
            leaf = each[0] if dim is None else torch.cat(each, dim).contiguous()
            packed = told.get(index)
            is_none = isinstance(packed, RowsByTokens) and packed.is_optional and not len(leaf)
            leaves.append(None if is_none else leaf)
        return leaves

    return [joined([row, row, other, other]), joined([row, row]), joined([other, other])]


def _without_images(
    row: Sequence[Any], where: Sequence[int | None], texts: int, dims: RowDims
) -> list[Any] | None:
    """Return a row with a word in place of each token that is none, and nothing packed."""
    is_kept = kept_tokens(row[texts], dims)[0]
    told, length = dict(dims), len(is_kept)
    if not bool(is_kept.any()) or bool(is_kept.all()):
        return None
    word = int((~is_kept).nonzero()[0])
    index = torch.where(is_kept, word, torch.arange(length, device=is_kept.device))
    other: list[Any] = []
    for number, (leaf, dim) in enumerate(zip(row, where, strict=True)):
        if isinstance(told.get(number), RowsByTokens) and number != texts:
            leaf = leaf[:0]
        elif dim == 0 and leaf.dim() > 1 and leaf.shape[1] == length:
            leaf = leaf[:, index]
        other.append(leaf)
    return other
