"""Attention in a forward on fake tensors of the CPU: as accelerators run it, and refused."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """Has ``F.scaled_dot_product_attention`` be one operator that keeps no scores.

    The CPU has no such kernel with dropout, nor for values that are narrower than keys, as those
    of latent attention. Torch then computes scores and keeps them for backward, (batch, heads,
    length, length), where an accelerator keeps what is given, what is returned and a number for
    each row of scores.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what attention does. A kernel draws in its midst, so dropout keeps nothing."""
    if query.dim() != 4 or query.shape[-1] == value.shape[-1] or enable_gqa:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        added = torch.zeros_like(attn_mask, dtype=query.dtype, device=query.device)
        attn_mask = added.masked_fill(~attn_mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, 0.0, is_causal, scale=scale
    )[0]


def refused_without_heads() -> contextlib.AbstractContextManager[Any]:
    """Return the context of a run on shapes that may leave a rank no head of the keys.

    ``F.scaled_dot_product_attention`` divides the number of query heads by that of key heads
    where these are shared (``enable_gqa``): by zero, a floating-point exception of the process
    in torch 2.11. A packed projection of few key heads, cut over many ranks, gives that.
    """
    return _WithHeads() if torch.__version__ < "2.13" else contextlib.nullcontext()


class _WithHeads(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            _check_heads(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _check_heads(
    query: Tensor, key: Tensor, *_: Any, enable_gqa: bool = False, **options: Any
) -> None:
    if enable_gqa and key.dim() > 2 and not key.shape[-3]:
        raise ValueError(f"attention of {query.shape[-3]} query heads has no key head")
