"""Products of linear layers, chunk by chunk.

The weight of a column-wise layer is cut along output features, that of a row-wise layer along
input features. ``parts`` are the parts of that dim that are cut one by one: their number (3 for
fused query, key and value), or their lengths where they differ. Every product gets contiguous
matrices that begin at a multiple of 64 bytes: their shapes, and nothing else, then decide in which
order a kernel adds.

Shapes: x (T, K), output (T, N); weight (N, K), or (K, N) where the input comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vescale_parallel._tensor_parallel.chunks import Parts, lengths_within

from .placed import begins_alike, placed
from .tree import tree_sum


@dataclass(frozen=True)
class Cut:
    """How this rank's part of a weight is made of chunks.

    Attributes:
        dim: Of the weight that is cut.
        is_out: Whether that is the output features.
        num_chunks: On this rank.
        parts: That are cut one by one.
    """

    dim: int
    is_out: bool
    num_chunks: int
    parts: Parts

    def features(self, x: Tensor) -> list[Tensor]:
        """Return the chunks of the last dim of a matrix, that is the cut features."""
        return self._chunks(x, 1)

    def weights(self, weight: Tensor) -> list[Tensor]:
        """Return the chunks of a weight as (in, out)."""
        chunks = self._chunks(weight, self.dim)
        return [chunk.t() for chunk in chunks] if self._is_out_first else chunks

    def joined(self, chunks: Sequence[Tensor], dim: int) -> Tensor:
        """Put chunks along ``dim`` of matrices, or of vectors, together."""
        if self.parts == 1:
            return torch.cat(list(chunks), dim) if len(chunks) > 1 else chunks[0]
        if isinstance(self.parts, tuple):
            apart = [chunk.split(self._lengths(chunk.shape[dim]), dim) for chunk in chunks]
            return torch.cat([each for part in zip(*apart, strict=True) for each in part], dim)
        split = [chunk.unflatten(dim, (self.parts, -1)) for chunk in chunks]
        return torch.cat(split, dim + 1).flatten(dim, dim + 1)

    def of_weight(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Return a weight's gradient, given (tokens, in) and (tokens, out) of every chunk."""
        if self._is_out_first:
            pairs = [(grad, x) for x, grad in pairs]
        factors = [(first.t(), second) for first, second in pairs]
        (num_rows, _), (_, num_columns) = factors[0][0].shape, factors[0][1].shape
        given = factors[0][0]
        chunk_nbytes = num_rows * num_columns * given.element_size()
        if self.dim == 0 and self.parts == 1 and len(factors) > 1 and begins_alike(chunk_nbytes):
            # Chunks are whole pieces of memory: nothing is to be moved.
            whole = given.new_empty(len(factors), num_rows, num_columns)
            for chunk, (first, second) in zip(whole.unbind(), factors, strict=True):
                torch.mm(first, second, out=chunk)
            return whole.flatten(0, 1)
        return self.joined([torch.mm(*pair) for pair in factors], self.dim)

    @property
    def _is_out_first(self) -> bool:
        return self.is_out == (self.dim == 0)

    def _lengths(self, length: int) -> list[int]:
        """Return the lengths of parts that are ``length`` long together, here or in a chunk."""
        return lengths_within(self.parts, length)

    def _chunks(self, x: Tensor, dim: int) -> list[Tensor]:
        if self.num_chunks == 1:
            return [placed(x)]
        if self.parts == 1:
            return list(map(placed, x.chunk(self.num_chunks, dim)))
        if isinstance(self.parts, tuple):
            apart = x.split(self._lengths(x.shape[dim]), dim)
            pieces = [part.chunk(self.num_chunks, dim) for part in apart]
            return [placed(torch.cat(each, dim)) for each in zip(*pieces, strict=True)]
        split = x.unflatten(dim, (self.parts, self.num_chunks, -1))
        return [placed(each.flatten(dim, dim + 1)) for each in split.unbind(dim + 1)]


def _as_output(y_TN: Tensor, x: Tensor) -> Tensor:
    # Programs may write into what they get, and autograd refuses to write into views made here.
    return torch.ops.aten._unsafe_view(y_TN, (*x.shape[:-1], y_TN.shape[-1]))


def _rows(x: Tensor) -> Tensor:
    return placed(x.reshape(-1, x.shape[-1]))


class Columns(torch.autograd.Function):
    """The output of a column-wise layer: of every copy of the input, one chunk of features."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, cut: Cut, weight: Tensor, bias: Tensor | None, *copies: Tensor
    ) -> Tensor:
        ctx.cut, ctx.has_bias = cut, bias is not None
        ctx.save_for_backward(weight, copies[0])
        x_TK = _rows(copies[0])
        chunks = [torch.mm(x_TK, weight_KC) for weight_KC in cut.weights(weight)]
        y_TN = cut.joined(chunks, 1)
        if bias is not None:
            y_TN += bias
        return _as_output(y_TN, copies[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, x = ctx.saved_tensors
        cut: Cut = ctx.cut
        x_TK = _rows(x)
        grads_TC = cut.features(grad.reshape(-1, grad.shape[-1]))
        of_copies: list[Tensor | None] = [None] * cut.num_chunks
        if any(ctx.needs_input_grad[3:]):
            pairs = zip(grads_TC, cut.weights(weight), strict=True)
            of_copies = [torch.mm(grad_TC, w_KC.t()).view_as(x) for grad_TC, w_KC in pairs]
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = cut.of_weight((x_TK, grad_TC) for grad_TC in grads_TC)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = cut.joined([grad_TC.sum(0) for grad_TC in grads_TC], 0)
        return None, of_weight, of_bias, *of_copies


class Rows(torch.autograd.Function):
    """The sum of the products of a row-wise layer's chunks, in the dtype of accumulation."""

    @staticmethod
    def forward(ctx: Any, cut: Cut, weight: Tensor, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.cut = cut
        ctx.save_for_backward(weight, x)
        xs_TC = cut.features(x.reshape(-1, x.shape[-1]))
        pairs = zip(xs_TC, cut.weights(weight), strict=True)
        y_TN = tree_sum([torch.mm(x_TC, w_CN) for x_TC, w_CN in pairs])
        return _as_output(y_TN, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, x = ctx.saved_tensors
        cut: Cut = ctx.cut
        grad_TN = _rows(grad.to(x.dtype))
        of_weight = of_x = None
        if ctx.needs_input_grad[2]:
            chunks = [torch.mm(grad_TN, w_CN.t()) for w_CN in cut.weights(weight)]
            of_x = cut.joined(chunks, 1).view_as(x)
        if ctx.needs_input_grad[1]:
            xs_TC = cut.features(x.reshape(-1, x.shape[-1]))
            of_weight = cut.of_weight((x_TC, grad_TN) for x_TC in xs_TC)
        return None, of_weight, of_x
