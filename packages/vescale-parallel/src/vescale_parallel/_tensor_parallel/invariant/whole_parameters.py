"""What ranks have whole and apply to their own tokens or heads: gradients are summed by chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .entrance import for_chunks
from .placed import placed

Conversion = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ChunkedCall:
    """What a module is called with, in chunks.

    Attributes:
        dim: That chunks are along, of what a module is called with and of what it returns.
        num_chunks: On this rank.
        is_sequence: Whether that is the sequence, whose length a program chooses.
    """

    dim: int
    num_chunks: int
    is_sequence: bool


def in_chunks(
    module: nn.Module, fqn: str, names: tuple[str, ...], call: ChunkedCall, over_ranks: Conversion
) -> None:
    """Have a module compute chunks of a dim one by one, and sum their gradients in a tree.

    Each token, or head, of the module's output depends on that one of its input. ``names`` are
    those of its parameters whose gradients are sums over them.
    """
    own, dim, num_chunks = module.forward, call.dim, call.num_chunks

    @functools.wraps(own)
    def chunked(*args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if x.dim() <= dim or x.shape[dim] % num_chunks:
            if call.is_sequence:  # an evaluation: a split refuses such lengths otherwise
                return own(*args, **kwargs)
            raise ValueError(
                f"numerics 'invariant': expected {fqn!r} to be called with a multiple of "
                f"{num_chunks} heads or features in dim {dim}, got shape {tuple(x.shape)}"
            )
        given = dict(module._parameters)
        copies = {name: _copies(given[name], num_chunks, over_ranks) for name in names}
        outputs: list[Tensor] = []
        try:
            for index, part in enumerate(x.chunk(num_chunks, dim)):
                for name, each in copies.items():
                    module._parameters[name] = each[index]  # pyright: ignore[reportArgumentType]: a Parameter
                outputs.append(own(placed(part), *args[1:], **(kwargs if args else {})))
        finally:
            module._parameters.update(given)
        if not all(isinstance(each, Tensor) for each in outputs):  # pyright: ignore[reportUnnecessaryIsInstance]: user code
            raise ValueError(
                f"numerics 'invariant': expected {fqn!r} to return a tensor, got "
                f"{type(outputs[0]).__name__}; leave numerics out of the plan"
            )
        return _together(outputs, dim)

    module.forward = chunked


def added_by_tokens(
    output: Tensor, bias: Tensor, dim: int, num_chunks: int, over_ranks: Conversion
) -> Tensor:
    """Add a bias to this rank's tokens."""
    if output.shape[dim] % num_chunks:
        return output + bias
    copies = _copies(bias, num_chunks, over_ranks)
    parts = output.chunk(num_chunks, dim)
    return _together([part + own for part, own in zip(parts, copies, strict=True)], dim)


class _Together(torch.autograd.Function):
    """Parts put together. Backward each gets memory of its own, which decides how kernels sum."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dim, ctx.num_parts = dim, len(parts)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *map(placed, grad.chunk(ctx.num_parts, ctx.dim))


def _together(parts: Sequence[Tensor], dim: int) -> Tensor:
    joined: Any = _Together.apply(dim, *parts)
    return joined


def _copies(
    parameter: Tensor | None, num_chunks: int, over_ranks: Conversion
) -> tuple[Tensor, ...]:
    assert parameter is not None
    return for_chunks(parameter, lambda x: x, over_ranks, num_chunks)[1]
