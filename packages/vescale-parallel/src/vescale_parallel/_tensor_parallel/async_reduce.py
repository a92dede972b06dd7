"""Asynchronous reduction: a chunk of a layer's output is reduced while the next is computed.

[Note: overlap] The input of a row-wise layer is split along its positions. When the partial output
of a chunk is there, its all-reduce starts beside the program, and so does, where activations are
sharded along the sequence, the all-gather of its gradient before the layer's backward needs it.
Sums are the same numbers, of matrix products that may be blocked otherwise: the last bits can
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .communicators import Ranks

# Gives the result when it is there.
Wait = Callable[[], Tensor]


class Beside(Protocol):
    """Runs collectives while the program goes on, one after the other."""

    @property
    def ranks(self) -> Ranks:
        """What the collectives are of: ranks that nobody else talks to meanwhile."""
        ...

    def start(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Wait:
        """Begin ``run(x)``; ``x`` must not change before the result was waited for."""
        ...


class ThreadBeside:
    """On a thread: for collectives of the host, which do not hold the interpreter's lock."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vescale-overlap")

    def start(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Wait:
        return self._pool.submit(_without_autograd, run, x).result


class StreamBeside:
    """On a stream of the device."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._stream = torch.cuda.Stream()

    def start(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Wait:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = _without_autograd(run, x)
        x.record_stream(self._stream)

        def wait() -> Tensor:
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            result.record_stream(current)
            return result

        return wait


class AtOnce:
    """Before the program goes on: for ranks that are threads, which communicate on no other."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def start(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Wait:
        result = _without_autograd(run, x)
        return lambda: result


def make_beside(ranks: Ranks) -> Beside:
    """Return what runs collectives of this process's device beside the program."""
    if getattr(dist.group.WORLD, "is_for_one_thread", False):
        return AtOnce(ranks)
    return StreamBeside(ranks) if torch.cuda.is_available() else ThreadBeside(ranks)


def _without_autograd(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return run(x)


def sum_in_parts(
    compute: Callable[[Tensor], Tensor], x: Tensor, dim: int | None, num_parts: int, beside: Beside
) -> Tensor:
    """Return the sum over ranks of what a layer computes, see [Note: overlap].

    Each position of the layer's output depends on that position of its input, in all dims but the
    last. A rank keeps its shard along ``dim``, which ranks must divide, or all if that is None.
    """
    chunks: list[_Chunk] = []
    partial: list[Tensor] = []
    for part in _parts(x, dim, num_parts, beside.ranks.size):
        chunk = _Chunk(beside, dim)
        # Contiguous as the whole is: a layer may view it.
        summand: Any = _Arrive.apply(compute(part.contiguous()), chunk)
        chunk.start_sum(summand.detach())
        chunks.append(chunk)
        partial.append(summand)
    total: Any = _Together.apply(chunks, -2 if dim is None else dim, *partial)
    return total


def _parts(x: Tensor, dim: int | None, num_parts: int, num_ranks: int) -> Sequence[Tensor]:
    if dim is None:
        return x.chunk(num_parts, -2)
    # A chunk has some of every rank's positions: reduce-scatter gives each rank a piece of its
    # own shard, and the pieces, joined in order, are the shard. Chunks of x would be shuffled.
    by_rank = x.unflatten(dim, (num_ranks, -1))
    return [part.flatten(dim, dim + 1) for part in by_rank.chunk(num_parts, dim + 1)]


class _Chunk:
    """One chunk on its way, forward and backward."""

    def __init__(self, beside: Beside, dim: int | None) -> None:
        self._beside, self._dim = beside, dim
        self._length = 0
        self._sum: Wait | None = None
        self._grad: Wait | None = None

    def start_sum(self, summand: Tensor) -> None:
        ranks, dim = self._beside.ranks, self._dim
        self._length = 0 if dim is None else summand.shape[dim]
        run = ranks.all_reduce if dim is None else lambda x: ranks.reduce_scatter(x, dim)
        self._sum = self._beside.start(run, summand)

    def take_sum(self) -> Tensor:
        wait, self._sum = self._sum, None
        assert wait is not None
        return wait()

    def start_grad(self, grad: Tensor) -> Tensor:
        """Begin to all-gather a gradient; return a placeholder of its shape until it is taken.

        Autograd demands a gradient of the chunk's shape at once; it hands it, unread, to
        :class:`_Arrive`, which waits for the real one. The placeholder has one element of memory.
        """
        ranks, dim, length = self._beside.ranks, self._dim, self._length
        if dim is None:
            return grad
        self._grad = self._beside.start(lambda x: ranks.all_gather(x, dim, length), grad)
        shape = (*grad.shape[:dim], length, *grad.shape[dim + 1 :])
        return grad.new_empty(()).expand(shape)

    def take_grad(self, placeholder: Tensor) -> Tensor:
        wait, self._grad = self._grad, None
        return placeholder if wait is None else wait()


class _Arrive(torch.autograd.Function):
    """Nothing forward; backward a chunk's gradient is waited for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk: _Chunk) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.chunk = chunk
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.chunk.take_grad(grad), None


class _Together(torch.autograd.Function):
    """The sums of all chunks; backward the all-gather of every chunk's gradient is started."""

    @staticmethod
    def forward(ctx: Any, chunks: Sequence[_Chunk], dim: int, *partial: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        sums = [chunk.take_sum() for chunk in chunks]
        ctx.chunks, ctx.dim, ctx.lengths = chunks, dim, [part.shape[dim] for part in sums]
        return torch.cat(sums, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = grad.split(ctx.lengths, ctx.dim)
        # Autograd runs the last chunk's layer first, so its gradient is needed first.
        started = [c.start_grad(g) for c, g in zip(ctx.chunks[::-1], grads[::-1], strict=True)]
        return None, None, *started[::-1]
