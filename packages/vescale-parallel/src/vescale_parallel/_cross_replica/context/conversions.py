"""Conversions of activations between slices of a sequence and other layouts, known to autograd.

[Note: whole and sliced] Outside of blocks every rank computes on whole sequences, and has the
whole gradient; inside it computes on its slice, and gradients of parameters are sums over ranks.
Gradients are averaged over the ranks of a sequence as over those of a batch, so what goes from
slices to whole sequences multiplies gradients by the number of ranks: the average of parts is then
their sum, and the average of whole gradients stays what it is. Where what is whole is read by
slices again, as keys are by a rank's queries, or an encoder's output by a decoder's slices, each
rank has a part of its gradient, and a slice gets the sum of these parts.

Attention is all-to-all over heads (DeepSpeed-Ulysses): ranks exchange slices of all heads for
whole sequences of some heads. Of grouped queries a rank gets the key-value heads that its queries
read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import ordered_sum

from .slices import ContextRanks, Range, SequenceSlices

_LOW = (torch.float16, torch.bfloat16)


def keep_slice(x: Tensor, dim: int, slices: SequenceSlices, ranks: ContextRanks) -> Tensor:
    """Return this rank's slice of a tensor that all ranks have whole."""
    return slices.part(x, dim, ranks.rank).contiguous()


def gather_slices(
    x: Tensor, dim: int, slices: SequenceSlices, ranks: ContextRanks, *, sums: bool = False
) -> Tensor:
    """Return the whole of what every rank has a slice of. Every rank must call this.

    ``sums`` says that ranks compute different parts of the whole's gradient, as where each of them
    attends with its own queries; they are summed then.
    """
    if slices.shared:
        return _gather_between(x, dim, slices, ranks, sums=sums)
    gather = _GatherParts if sums else _Gather
    return gather.apply(x, dim, slices, ranks)  # pyright: ignore[reportReturnType]: torch's own stub


def _gather_between(
    x: Tensor, dim: int, slices: SequenceSlices, ranks: ContextRanks, *, sums: bool
) -> Tensor:
    """Gather what ranks have apart, between what every rank has, which stays its own."""
    mine = slices.ranges[ranks.rank]
    parts = [*zip(mine, x.split([end - first for first, end in mine], dim), strict=True)]
    shared = {each: part for each, part in parts if each in slices.shared}
    own = [part for each, part in parts if each not in shared] or [x.narrow(dim, 0, 0)]
    rest = gather_slices(torch.cat(own, dim), dim, slices.apart(), ranks, sums=sums)
    found, place, at = list[Tensor](), 0, 0
    for first, end in slices.shared:
        found += [rest.narrow(dim, at, first - place), shared[first, end]]
        at, place = at + first - place, end
    return torch.cat([*found, rest.narrow(dim, at, rest.shape[dim] - at)], dim)


def with_whole_gradient(x: Tensor, ranks: ContextRanks) -> Tensor:
    """Return a whole tensor that a program gives, whose gradient is whole, too.

    Of what slices are made of it, each rank has its part of the gradient. Every rank must call
    this, and differentiate it or not.
    """
    return _WholeGradient.apply(x, ranks)  # pyright: ignore[reportReturnType]: torch's own stub


def to_heads(
    x: Tensor, heads: Sequence[Range], sizes: Sequence[int], ranks: ContextRanks
) -> Tensor:
    """Return whole sequences of this rank's heads (.., heads, S, D) of slices of all heads.

    ``heads`` are those of each rank, which may overlap. Every rank must call this.
    """
    return _ToHeads.apply(x, heads, sizes, ranks)  # pyright: ignore[reportReturnType]: torch's own stub


def to_slices(
    x: Tensor, heads: Sequence[Range], sizes: Sequence[int], ranks: ContextRanks
) -> Tensor:
    """Return this rank's slice of all heads; the opposite of :func:`to_heads`."""
    return _ToSlices.apply(x, heads, sizes, ranks)  # pyright: ignore[reportReturnType]: torch's own stub


class _WholeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ContextRanks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks: ContextRanks = ctx.ranks
        gathered = ranks.all_gather(grad[None], 0, [1] * ranks.size)
        # As parameters' gradients are averaged; see [Note: whole and sliced].
        return sum_of_ranks(gathered) / ranks.size, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, slices: SequenceSlices, ranks: ContextRanks
    ) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.given = dim, slices, ranks
        return slices.whole(ranks.all_gather(x, dim, slices.sizes), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, _, ranks = ctx.given
        # See [Note: whole and sliced].
        return keep_slice(grad, *ctx.given) * ranks.size, None, None, None


class _GatherParts(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dim, slices, ranks = ctx.given
        parts = [slices.part(grad, dim, rank) for rank in range(ranks.size)]
        shape = parts[ranks.rank].shape
        sent = [part.reshape(-1) for part in parts]
        arrived = _exchanged(sent, [shape] * ranks.size, ranks)
        return sum_of_ranks(torch.stack(arrived)), None, None, None


def sum_of_ranks(rows: Tensor) -> Tensor:
    """Return the sum over the first dim, in order, in float32 at least."""
    sums = torch.float32 if rows.dtype in _LOW else rows.dtype
    return ordered_sum(rows, accumulate=sums).to(rows.dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, heads: Sequence[Range], sizes: Sequence[int], ranks: ContextRanks
    ) -> Tensor:
        ctx.given = heads, sizes, ranks, x.shape[-3]
        return _send_heads(x, heads, sizes, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _send_slices(grad, *ctx.given), None, None, None


class _ToSlices(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, heads: Sequence[Range], sizes: Sequence[int], ranks: ContextRanks
    ) -> Tensor:
        ctx.given = heads, sizes, ranks
        return _send_slices(x, heads, sizes, ranks, heads[-1][1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _send_heads(grad, *ctx.given), None, None, None


def _send_heads(
    x: Tensor, heads: Sequence[Range], sizes: Sequence[int], ranks: ContextRanks
) -> Tensor:
    lead, features = x.shape[:-3], x.shape[-1]
    sent = [x[..., first:end, :, :].reshape(-1) for first, end in heads]
    first, end = heads[ranks.rank]
    shapes = [(*lead, end - first, size, features) for size in sizes]
    return torch.cat(_exchanged(sent, shapes, ranks), -2)


def _send_slices(
    x: Tensor, heads: Sequence[Range], sizes: Sequence[int], ranks: ContextRanks, num_heads: int
) -> Tensor:
    lead, features, own = x.shape[:-3], x.shape[-1], sizes[ranks.rank]
    sent = [part.reshape(-1) for part in x.split([*sizes], -2)]
    shapes = [(*lead, end - first, own, features) for first, end in heads]
    arrived = _exchanged(sent, shapes, ranks)
    if all(end == first for (_, end), (first, _) in itertools.pairwise(heads)):
        return torch.cat(arrived, -3)
    total = x.new_zeros(*lead, num_heads, own, features)
    for part, (first, end) in zip(arrived, heads, strict=True):
        total[..., first:end, :, :] += part
    return total


def _exchanged(
    parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: ContextRanks
) -> list[Tensor]:
    """Send each rank its part; return what came from each rank, in these shapes."""
    received = [torch.Size(shape).numel() for shape in shapes]
    arrived = ranks.all_to_all(torch.cat([*parts]), [part.numel() for part in parts], received)
    return [x.view(*shape) for x, shape in zip(arrived.split(received), shapes, strict=True)]


def calling_back(x: Tensor, function: Callable[[], None]) -> Tensor:
    """Return a tensor whose gradient, when it arrives, calls a function first."""
    return _CallingBack.apply(x, function)  # pyright: ignore[reportReturnType]: torch's own stub


class _CallingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.function()
        return grad, None
