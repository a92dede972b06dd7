"""Collectives that autograd knows, and whose bits depend on the values and the ranks alone.

[Note: gradients of collectives] The gradient of a tensor is that of the sum over ranks of
every rank's loss. An all-reduce is then its own transpose; all-gather and reduce-scatter are
each other's; an all-to-all sends back. So each backward pass is one of these functions again,
and can be differentiated in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._layout.placements import ReduceOp

from .checks import check_divisible, check_equal_shapes, check_out
from .groups import Peers, peers_of
from .ordered_reduce import (
    ReduceOrder,
    Reduction,
    all_reduce_parts,
    reduce_rows,
    reduce_scatter_parts,
)
from .primitives import (
    Splits,
    all_gather_into,
    all_gather_parts,
    all_gather_uneven_parts,
    all_to_all_into,
    all_to_all_parts,
    joined,
    parts_of,
    shapes_of,
)

Where = dist.ProcessGroup | DeviceMesh
Axes = Sequence[int | str] | int | str | None


def all_reduce(
    tensor: Tensor,
    where: Where,
    *,
    axes: Axes = None,
    op: ReduceOp = "sum",
    order: ReduceOrder = "rank",
    accumulate: torch.dtype | None = None,
) -> Tensor:
    """Reduce tensors of one shape over ranks. Every rank of ``where`` must call this.

    Args:
        tensor: Of the same shape and dtype on every rank, and requiring grad on all or none.
        where: A process group, or a mesh.
        axes: Indices or names of axes of the mesh, ascending, None for all; several act as
            one group, in one collective. Absent for a process group.
        op: ``sum`` and ``avg`` have gradients.
        order: ``rank`` reduces in rank order, to the same bits everywhere and always;
            ``library`` leaves the order to the backend.
        accumulate: The dtype in which ``rank`` adds up; None is float32 for half precision
            and otherwise the dtype of the tensor.

    Returns:
        A new tensor, bit-equal on every rank.

    Raises:
        ValueError: Before any communication, if an argument does not fit the others.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from vescale_dtensor import emulate
        >>> with emulate(4):
        ...     mesh = init_device_mesh("cpu", (2, 2))
        ...     all_reduce(torch.ones(2), mesh).of_rank(3)
        tensor([4., 4.])
    """
    how = _reduction(op, order, accumulate)
    how.check(tensor)
    peers = peers_of(where, axes)
    check_equal_shapes(tensor, peers)
    return _all_reduce(tensor, peers, how)


def reduce_scatter(
    rows: Tensor,
    where: Where,
    *,
    axes: Axes = None,
    op: ReduceOp = "sum",
    order: ReduceOrder = "rank",
    accumulate: torch.dtype | None = None,
    sizes: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Reduce row r of every rank onto rank r. Every rank of ``where`` must call this.

    Args:
        rows: (ranks, *shape), row r meant for rank r; with ``sizes``, (sum of sizes, *shape).
        where: A process group, or a mesh.
        axes: As for :func:`all_reduce`.
        op: As for :func:`all_reduce`.
        order: As for :func:`all_reduce`.
        accumulate: As for :func:`all_reduce`.
        sizes: How many indices of dim 0 are meant for each rank; the same on every rank.

    Returns:
        What is meant for this rank: (*shape), or with ``sizes`` (own size, *shape).

    Raises:
        ValueError: Before any communication, if an argument does not fit the others.
    """
    how = _reduction(op, order, accumulate)
    how.check(rows)
    peers = peers_of(where, axes)
    splits = _splits(sizes, peers)
    _check_dim_0(rows, splits, peers, "one row per rank" if sizes is None else "sizes")
    return _reduce_scatter(rows, None if sizes is None else splits, peers, how)


def all_gather(
    tensor: Tensor,
    where: Where,
    *,
    axes: Axes = None,
    order: ReduceOrder = "rank",
    sizes: Sequence[int] | Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Give every rank the tensors of all, in rank order. Every rank of ``where`` must call this.

    Args:
        tensor: Of the same shape and dtype on every rank; with ``sizes``, of the same shape
            beyond dim 0. Requires grad on all ranks or none.
        where: A process group, or a mesh.
        axes: As for :func:`all_reduce`.
        order: In which the backward pass sums gradients.
        sizes: The length along dim 0 of every rank's tensor; the same on every rank.
        out: Contiguous, (ranks, *shape): is written, without gradients, and returned. Not with
            ``sizes``.

    Returns:
        Stacked, (ranks, *shape); with ``sizes`` concatenated, (sum of sizes, *rest of shape).

    Raises:
        ValueError: Before any communication, if an argument does not fit the others.
    """
    how = _reduction("sum", order, None)
    peers = peers_of(where, axes)
    if out is not None:
        shape = torch.Size((peers.num_ranks, *tensor.shape))
        check_out(out, tensor, shape, is_uneven=sizes is not None)
        all_gather_into(out, tensor, peers)
        return out
    if sizes is None:
        check_equal_shapes(tensor, peers)
        return _all_gather(tensor, None, peers, how)
    splits = _splits(sizes, peers)
    _check_own_size(tensor, splits, peers)
    return _all_gather(tensor, splits, peers, how)


def all_to_all(
    tensor: Tensor,
    where: Where,
    *,
    axes: Axes = None,
    input_splits: Sequence[int] | Tensor | None = None,
    output_splits: Sequence[int] | Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Send every rank its split of dim 0. Every rank of ``where`` must call this.

    Args:
        tensor: Any shape but a scalar's; beyond dim 0 the same on every rank. Requires grad on
            all ranks or none.
        where: A process group, or a mesh.
        axes: As for :func:`all_reduce`.
        input_splits: How many indices of dim 0 go to each rank; None for equal splits on all
            ranks. A tensor of integers is read, which waits for its device; emulated ranks,
            whose splits differ, need one.
        output_splits: How many come from each rank; given exactly if ``input_splits`` are.
        out: Contiguous, of the shape of ``tensor``: is written, without gradients, and returned.
            Not with splits.

    Returns:
        What the ranks sent here, concatenated in rank order.

    Raises:
        ValueError: Before any communication, if the splits do not fit.
    """
    peers = peers_of(where, axes)
    if (input_splits is None) != (output_splits is None):
        raise ValueError(
            "expected input_splits and output_splits, or neither, "
            f"got {input_splits!r} and {output_splits!r}"
        )
    if out is not None:
        check_out(out, tensor, tensor.shape, is_uneven=input_splits is not None)
        check_divisible(tensor, peers)
        all_to_all_into(out, tensor, peers)
        return out
    if input_splits is None:
        check_divisible(tensor, peers)
        return _all_to_all(tensor, None, None, peers)
    sent, received = _splits(input_splits, peers), _splits(output_splits, peers)
    _check_dim_0(tensor, sent, peers, "input_splits")
    _check_agreement(sent, received, peers)
    return _all_to_all(tensor, sent, received, peers)


def ordered_sum(
    rows: Tensor, *, accumulate: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Sum what ranks sent, in rank order, as :func:`all_reduce` does. Nobody communicates.

    Args:
        rows: (ranks, *shape), what :func:`all_gather` or :func:`all_to_all` returned.
        accumulate: As for :func:`all_reduce`.
        out: (*shape), the first row itself if that is no longer needed: is written, without
            gradients, and returned.

    Returns:
        The sum, (*shape).

    Raises:
        ValueError: If an argument does not fit ``rows``.

    Example:
        >>> ordered_sum(torch.ones(3, 2))
        tensor([3., 3.])
    """
    how = _reduction("sum", "rank", accumulate)
    how.check(rows)
    if out is not None:
        check_out(out, rows, rows.shape[1:], is_uneven=False)
        return reduce_rows(rows.unbind(), how, out)
    return _recorded(
        rows,
        lambda t: reduce_rows(t.unbind(), how),
        lambda grad: grad.unsqueeze(0).expand(rows.shape),
    )


@cache
def _reduction(op: ReduceOp, order: ReduceOrder, accumulate: torch.dtype | None) -> Reduction:
    return Reduction(op=op, order=order, accumulate=accumulate)


def _splits(splits: Sequence[int] | Tensor | None, peers: Peers) -> Splits:
    """Return one size per peer, for each rank in this process."""
    if splits is None:
        return ((1,) * peers.num_ranks,) * peers.num_here
    if isinstance(splits, Tensor):
        found = tuple(tuple(map(int, part.tolist())) for part in parts_of(splits, peers))
    else:
        found = (tuple(splits),) * peers.num_here
    for sizes in found:
        if len(sizes) != peers.num_ranks or min(sizes) < 0:
            raise ValueError(
                f"expected a size of at least 0 for each of {peers.num_ranks} ranks, got {sizes}"
            )
    return found


def _check_dim_0(tensor: Tensor, splits: Splits, peers: Peers, expected: str) -> None:
    for shape, sizes in zip(shapes_of(tensor, peers), splits, strict=True):
        if not shape or shape[0] != sum(sizes):
            raise ValueError(
                f"expected dim 0 to be {sum(sizes)} ({expected}: {sizes}), "
                f"got shape {tuple(shape)}"
            )


def _check_own_size(tensor: Tensor, splits: Splits, peers: Peers) -> None:
    for here, (shape, sizes) in enumerate(zip(shapes_of(tensor, peers), splits, strict=True)):
        own = sizes[peers.place_of(here)]
        if not shape or shape[0] != own:
            raise ValueError(
                f"expected dim 0 of this rank to be {own} (sizes: {sizes}), "
                f"got shape {tuple(shape)}"
            )


def _check_agreement(sent: Splits, received: Splits, peers: Peers) -> None:
    """Compare what one rank in this process sends with what another expects."""
    emulated = peers.emulated or ()
    for rank, ranks in enumerate(emulated):
        expected = tuple(sent[peer][emulated[peer].index(rank)] for peer in ranks)
        if received[rank] != expected:
            raise ValueError(
                f"expected output_splits {expected} on rank {rank}, as ranks {ranks} send, "
                f"got {received[rank]}"
            )


class _Linear(torch.autograd.Function):
    """A collective, and its transpose for the way back."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        tensor: Tensor,
        run: Callable[[Tensor], Tensor],
        transposed: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.transposed = transposed
        # What is received is often a view of a buffer, and autograd refuses to write into
        # views that were made in here. Nothing else sees the buffer.
        result = run(tensor)
        return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.transposed(grad), None, None


def _recorded(
    tensor: Tensor, run: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor]
) -> Tensor:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _Linear.apply(tensor, run, transposed)  # pyright: ignore[reportReturnType]: apply is untyped
    return run(tensor)


def _all_reduce(tensor: Tensor, peers: Peers, how: Reduction) -> Tensor:
    return _recorded(
        tensor,
        lambda t: joined(all_reduce_parts(parts_of(t, peers), peers, how), peers),
        lambda grad: _all_reduce(grad, peers, how),
    )


def _reduce_scatter(rows: Tensor, splits: Splits | None, peers: Peers, how: Reduction) -> Tensor:
    def transposed(grad: Tensor) -> Tensor:
        gathered = _all_gather(grad, splits, peers, replace(how, op="sum"))
        return gathered / peers.num_ranks if how.op == "avg" else gathered

    return _recorded(
        rows,
        lambda t: joined(reduce_scatter_parts(parts_of(t, peers), splits, peers, how), peers),
        transposed,
    )


def _all_gather(tensor: Tensor, splits: Splits | None, peers: Peers, how: Reduction) -> Tensor:
    def run(tensor: Tensor) -> Tensor:
        parts = parts_of(tensor, peers)
        if splits is None:
            return joined(all_gather_parts(parts, peers), peers)
        return joined(all_gather_uneven_parts(parts, splits, peers), peers)

    return _recorded(tensor, run, lambda grad: _reduce_scatter(grad, splits, peers, how))


def _all_to_all(
    tensor: Tensor, sent: Splits | None, received: Splits | None, peers: Peers
) -> Tensor:
    return _recorded(
        tensor,
        lambda t: joined(all_to_all_parts(parts_of(t, peers), peers, sent, received), peers),
        lambda grad: _all_to_all(grad, received, sent, peers),
    )
