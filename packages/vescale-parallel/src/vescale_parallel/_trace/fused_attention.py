"""Attention as accelerators run it, in a forward on fake tensors of the CPU."""

from __future__ import annotations

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
