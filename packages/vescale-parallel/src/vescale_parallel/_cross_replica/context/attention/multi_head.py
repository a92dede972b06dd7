"""``F.multi_head_attention_forward``, which ``nn.MultiheadAttention`` calls, of sliced tensors."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._cross_replica.context.sliced.tensor import gathered

_ROWS = 3  # dims of (positions, rows, features), as the function has them
_SELDOM = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")


@functools.cache
def _signature() -> inspect.Signature:
    return inspect.signature(F.multi_head_attention_forward)


def arguments(args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the function was called with, by name."""
    bound = _signature().bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def is_usual(given: Mapping[str, Any]) -> bool:
    """Whether :func:`multi_head_attention` computes a call: with rows, and no keys of its own."""
    return given["query"].ndim == _ROWS and not any(_is_given(given[name]) for name in _SELDOM)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def multi_head_attention(given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return attention (L, B, E), and its weights (B, L, S) or (B, heads, L, S).

    It is composed of the functions that torch's own is (torch/nn/functional.py), each of which
    is known for sliced tensors.
    """
    query, key, value = _projected(given)
    rate = given["dropout_p"] if given["training"] else 0.0
    mask, is_causal = _mask(given, query)
    weights = None
    if given["need_weights"]:
        weights = _weights(query, key, mask, rate)
        made = weights @ value
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    else:
        made = F.scaled_dot_product_attention(query, key, value, mask, rate, is_causal)
    rows, _, positions, _ = made.shape
    made = made.permute(2, 0, 1, 3).reshape(positions, rows, -1)
    return F.linear(made, given["out_proj_weight"], given["out_proj_bias"]), weights


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, rate: float) -> Tensor:
    """Return weights (B, heads, L, S), of which dropout is drawn for (B * heads, L, S)."""
    scores = (query * math.sqrt(1.0 / query.shape[-1])) @ key.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    if not rate:
        return weights
    return F.dropout(weights.flatten(0, 1), rate).reshape(weights.shape)


def _projected(given: Mapping[str, Any]) -> list[Tensor]:
    """Return queries, keys and values (B, heads, L, D)."""
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    found = list[Tensor]()
    for name, weight, each in zip(("query", "key", "value"), weights, biases, strict=True):
        x = F.linear(given[name], weight, each)
        positions, rows, features = x.shape
        heads = given["num_heads"]
        x = x.reshape(positions, rows, heads, features // heads)
        found.append(x.permute(1, 2, 0, 3))
    return found


def _mask(given: Mapping[str, Any], query: Tensor) -> tuple[Tensor | None, bool]:
    """Return what is added to scores, broadcast to (B, heads, L, S), and whether they are causal.

    As torch has it, a mask that is said to be causal is left out where the kernel knows it.
    """
    mask, padding = (_added(gathered(given[name]), query.dtype) for name in _MASKS)
    if given["is_causal"] and given["attn_mask"] is None:
        raise RuntimeError(
            "expected attn_mask besides is_causal of multi-head attention, got None"
        )
    if given["is_causal"] and padding is None and not given["need_weights"]:
        return None, True
    if mask is not None and mask.ndim == _ROWS:
        mask = mask.unflatten(0, (query.shape[0], -1))
    if padding is not None:
        padding = padding[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask, False


_MASKS = ("attn_mask", "key_padding_mask")


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to scores of a mask that is True where nobody attends."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(mask, float("-inf"))
