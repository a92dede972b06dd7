"""What a model returned for micro-batches, put together; every rank of a pipeline gets it.

[Note: what prediction costs] Without gradients a pipeline runs its forward passes only. The last
stage then sends all that the model returned to the others, as the program of one device has it:
logits are as many bytes as the last stage computed, once for each call. Micro-batches are equal:
the plan's number of them, or the largest smaller one that divides the rows. There is one where
rows depend on each other, or where it could not be seen which dim of a result the rows are.

[Note: losses of the program] A loop may compute its loss from what forward returns
(``loss = criterion(model(x), y)``). It is not known before forward has returned for all rows, so
all forward passes run before the first backward pass, as in GPipe, whatever the schedule: every
stage keeps the activations of all its micro-batches. All ranks get the outputs, as in prediction,
and compute the loss; the gradients of what the last stage returned are all that a backward pass
needs, and every rank has them: each takes those of the rows of a micro-batch. ``loss_fn`` runs
the schedule of the plan, and sends no outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement

from vescale_dtensor import DTensor
from vescale_parallel._cross_replica.borders import (
    ListOfRows,
    NotOfParts,
    Output,
    RowCoupling,
    Rows,
)
from vescale_parallel._cross_replica.results.row_lists import RowList, folded
from vescale_parallel._loss.aligned import Aligned
from vescale_parallel._loss.not_returned import NotReturned
from vescale_parallel._loss.output import Scalar, is_loss
from vescale_parallel._pipeline.cuts.placeholders import Placeholder
from vescale_parallel._pipeline.microbatches import rows_within
from vescale_parallel._torch_private import pytree

# By the name of what is returned, where the rows are in it.
Returned = Mapping[str, Output]


@dataclass(frozen=True)
class Sent:
    """A tensor that the last stage sends, as the other stages are told of it.

    Attributes:
        shape: Of what this rank's neighbours along the pipeline hold.
        dtype: Likewise.
        placements: Over tensor-parallel ranks, of a distributed tensor; None of a plain one.
        global_shape: Of the distributed tensor.
        requires_grad: Whether it depends on parameters in a step that is differentiated.
        name: Where it is in what forward returned.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None = None
    global_shape: tuple[int, ...] = ()
    requires_grad: bool = False
    name: str = ""


def returned_rows(
    coupling: RowCoupling, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Returned | None:
    """Return where the rows are in what a call returns; None if it has to run in one piece."""
    if coupling.regions or coupling.rows_of(args, kwargs) is None:
        return None
    return None if coupling.returned is None else dict(coupling.returned)


def num_microbatches_for(num_rows: int, most: int) -> int:
    """Return the largest number of equal micro-batches of rows, up to ``most``.

    Example:
        >>> num_microbatches_for(6, 4), num_microbatches_for(7, 4)
        (3, 1)
    """
    return next((n for n in range(most, 1, -1) if num_rows and num_rows % n == 0), 1)


def common_num_microbatches(
    num_rows: int,
    most: int,
    limit: int,
    num_ranks: int,
    total: Callable[[Tensor], Tensor],
    device: str,
) -> int:
    """Return the largest number of equal micro-batches, up to each rank's ``most``, for all.

    Args:
        num_rows: Of this rank.
        most: What this rank would have alone.
        limit: What no rank exceeds.
        num_ranks: That share a batch. Each must call this.
        total: Sums a tensor over them.
        device: Where it shall be.
    """
    suits = [n <= most and num_rows % n == 0 for n in range(1, limit + 1)]
    votes = total(torch.tensor(suits, dtype=torch.float64, device=device)).tolist()
    return max(n for n, vote in enumerate(votes, 1) if int(vote) == num_ranks)


def joined(
    outputs: Sequence[Any],
    rows: Returned | None,
    sizes: Sequence[int],
    mean: Callable[[Sequence[Tensor]], Tensor],
    loss_of: Callable[[Any], Tensor | None] = lambda _: None,
) -> tuple[Any, list[Tensor]]:
    """Put together what the micro-batches returned.

    Args:
        outputs: Of every micro-batch, in order.
        rows: Where the rows are; not needed for a single micro-batch.
        sizes: Rows of every micro-batch.
        mean: Returns the mean of one scalar over the global batch.
        loss_of: Returns what was differentiated.

    Returns:
        The structure, with a :class:`Scalar` for each scalar, :class:`NotReturned` for one that no
        mean over micro-batches is, and :class:`Sent` for other tensors; and these tensors.

    Raises:
        ValueError: If a tensor of another stage was returned, or one cannot be put together.
    """
    aligned = Aligned.of(_with_lists(outputs, rows))
    leaves, spec = pytree.tree_flatten(aligned.fullest)
    names = aligned.names
    tensors: list[Tensor] = []
    loss = loss_of(aligned.fullest)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Placeholder):
            raise ValueError(_refusal(aligned.fullest, names[index]))
        column = aligned.columns[index]
        if isinstance(leaf, RowList):
            elements = [x for part in column.values() for x in part.elements]
            tensors += [x for x in elements if isinstance(x, Tensor)]
            leaves[index] = leaf.kind(_told_of_list(elements, names[index]))
            continue
        if not isinstance(leaf, Tensor):
            continue
        at = None if rows is None else rows.get(names[index])
        if isinstance(at, NotOfParts) and leaf is not loss:
            leaves[index] = NotReturned(names[index], "as a mean")
            continue
        if is_loss(leaf):
            found = aligned.of_all(index, len(outputs))
            leaves[index] = Scalar(mean(found), leaf.dtype, leaf is loss, leaf.requires_grad)
            continue
        with torch.no_grad():
            tensors.append(_joined(names[index], [*column.values()], at, sizes))
        leaves[index] = replace(
            _told(tensors[-1]), requires_grad=leaf.requires_grad, name=names[index]
        )
    return pytree.tree_unflatten(leaves, spec), tensors


def grads_of_parts(
    grads: Sequence[Tensor | None],
    outputs: Sequence[Any],
    rows: Returned | None,
    sizes: Sequence[int],
) -> list[list[Tensor | None]]:
    """Take apart the gradients of what :func:`joined` put together.

    Args:
        grads: Of every joined tensor with a graph, in order; None of those that were not used.
        outputs: Of every micro-batch, in order.
        rows: Where the rows are; not needed for a single micro-batch.
        sizes: Rows of every micro-batch.

    Returns:
        For every micro-batch, of its tensors with a graph.
    """
    aligned = Aligned.of(_with_lists(outputs, rows))
    found: list[list[Tensor | None]] = [[] for _ in sizes]
    every, leaves = iter(grads), pytree.tree_leaves(aligned.fullest)
    for name, leaf, column in zip(aligned.names, leaves, aligned.columns, strict=True):
        if isinstance(leaf, RowList):
            for index, part in column.items():
                trained = [x for x in part.elements if isinstance(x, Tensor) and x.requires_grad]
                found[index] += [next(every) for _ in trained]
        elif isinstance(leaf, Tensor) and leaf.requires_grad:
            grad = next(every)
            at = (rows or {}).get(name)
            parts = [None] * len(column) if grad is None else _parts(grad, at, sizes, column)
            for index, part in zip(column, parts, strict=True):
                found[index].append(part)
    return found


def _told_of_list(elements: Sequence[Tensor | NotReturned], name: str) -> list[Any]:
    """Return what the other stages are told of the elements of a list of rows."""
    return [
        replace(_told(x), requires_grad=x.requires_grad, name=f"{name}[{number}]")
        if isinstance(x, Tensor)
        else x
        for number, x in enumerate(elements)
    ]


def _with_lists(outputs: Sequence[Any], rows: Returned | None) -> Sequence[Any]:
    """Return outputs of micro-batches in which lists of rows are leaves."""
    names = [name for name, at in (rows or {}).items() if isinstance(at, ListOfRows)]
    return [folded(output, names) for output in outputs] if names else outputs


def _parts(
    grad: Tensor, at: Output, sizes: Sequence[int], column: Mapping[int, Tensor]
) -> list[Tensor | None]:
    if len(column) == 1:
        return [grad]
    if not isinstance(at, Rows):
        # Equal for all micro-batches: the first one's was given to the program.
        return [grad, *[None] * (len(column) - 1)]
    if at.outermost:  # rows of micro-batches may have more elements than others
        return [*grad.split([x.shape[at.dim] for x in column.values()], at.dim)]
    starts = itertools.accumulate(sizes, initial=0)
    return [
        rows_within(grad, at, start, size, sum(sizes))
        for start, size in zip(starts, sizes, strict=False)
    ]


def _joined(name: str, found: Sequence[Tensor], at: Output, sizes: Sequence[int]) -> Tensor:
    if len(found) == 1:
        return found[0]
    if not isinstance(at, Rows):
        if all(torch.equal(x, found[0]) for x in found):
            return found[0]
        raise ValueError(
            f"forward returns a tensor {name} of shape {tuple(found[0].shape)} that differs "
            "between micro-batches and has no dim that is known to be the rows of the batch; "
            "evaluate with pipeline_parallel.microbatches 1"
        )
    if at.outermost:
        return torch.cat([*found], at.dim)
    apart = [x.unflatten(at.dim, (-1, n)) for x, n in zip(found, sizes, strict=True)]
    return torch.cat(apart, at.dim + 1).flatten(at.dim, at.dim + 1)


def _refusal(output: Any, where: str) -> str:
    return (
        f"forward returns {type(output).__name__}{where}, which another stage of the pipeline "
        "computes: hidden states and attentions of all layers are on several ranks. Do not ask "
        "for them (output_hidden_states=False, output_attentions=False), or use "
        "pipeline_parallel.size 1"
    )


def _told(tensor: Tensor) -> Sent:
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        return Sent(tuple(local.shape), local.dtype, tuple(tensor.placements), tuple(tensor.shape))
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(
            f"a pipeline sends the dense tensors that forward returns, got one of layout "
            f"{tensor.layout}; return a dense one, or use pipeline_parallel.size 1"
        )
    return Sent(tuple(tensor.shape), tensor.dtype)
