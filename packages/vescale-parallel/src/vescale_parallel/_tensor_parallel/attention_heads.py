"""torch's own nn.MultiheadAttention on this rank's heads.

Its code passes weights to one function that counts on whole ones: no integer on the module makes
it compute a few heads. So a rank whose packed projection is cut by heads runs these few lines
instead, with the same results, masks and options.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import InterleavedShard

from .conversions import Boundary

PACKED = InterleavedShard(0, 3)


def parameters_by_heads(module: nn.Module, size: int) -> dict[str, Placement]:
    """Return how an attention layer's parameters are sharded by heads, nothing if not."""
    if not isinstance(module, nn.MultiheadAttention) or _why_not(module, size):
        return {}
    found: dict[str, Placement] = {"in_proj_weight": PACKED}
    if module.in_proj_bias is not None:  # pyright: ignore[reportUnnecessaryComparison]: without bias
        found["in_proj_bias"] = PACKED
    return {**found, "out_proj.weight": Shard(1)}


def why_whole(module: nn.Module, size: int) -> str:
    """Return why an attention layer of torch stays whole, nothing for other modules."""
    return _why_not(module, size) if isinstance(module, nn.MultiheadAttention) else ""


def _why_not(module: nn.MultiheadAttention, size: int) -> str:
    if type(module).forward is not nn.MultiheadAttention.forward:
        return f"{type(module).__name__} has a forward of its own"
    if module.in_proj_weight is None:  # pyright: ignore[reportUnnecessaryComparison]: with kdim or vdim
        return "its keys or values have another width than its queries"
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "it adds a key and value of its own (add_bias_kv or add_zero_attn)"
    if module.num_heads % size:
        return f"its {module.num_heads} heads are not divisible by {size}"
    return ""


def cut_attention(
    modules: Mapping[str, nn.Module], placements: Mapping[str, Placement]
) -> dict[str, nn.MultiheadAttention]:
    """Return the attention layers of torch that a plan shards by heads."""
    return {
        fqn: module
        for fqn, module in modules.items()
        if isinstance(module, nn.MultiheadAttention)
        and placements.get(f"{fqn}.in_proj_weight") == PACKED
    }


def check_attention(
    modules: Mapping[str, nn.Module], placements: Mapping[str, Placement], size: int
) -> None:
    """Raise if a plan shards an attention layer in a way that is not known."""
    for fqn, module in modules.items():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight")
        found = {n: placements[f"{fqn}.{n}"] for n in names if f"{fqn}.{n}" in placements}
        cut = {n: p for n, p in found.items() if isinstance(p, Shard | InterleavedShard)}
        if not cut:
            continue
        why = _why_not(module, size)
        wanted = {"in_proj_weight": PACKED, "out_proj.weight": Shard(1)}
        if module.in_proj_bias is not None:  # pyright: ignore[reportUnnecessaryComparison]: without bias
            wanted["in_proj_bias"] = PACKED
        if why or cut != wanted:
            raise ValueError(
                f"tensor_parallel.sharding_plan: expected in_proj_weight and in_proj_bias of "
                f"{fqn!r} to be 'InterleavedShard(0, 3)' and its out_proj.weight 'Shard(1)', got "
                f"{cut}" + (f"; it stays whole, since {why}" if why else "")
            )


@dataclass(frozen=True, kw_only=True)
class AttentionCuts:
    """How activations reach and leave an attention layer: the dim that they are sharded along.

    None is for what is whole. ``stack`` is the stack of blocks that the layer is in.
    """

    query: int | None
    key: int | None
    value: int | None
    output: int | None
    stack: str


def attend_by_heads(
    module: nn.MultiheadAttention, boundary: Boundary, cuts: AttentionCuts
) -> None:
    """Have a layer that holds a rank's shard of the parameters compute this rank's heads."""
    size, rank = boundary.ranks.size, boundary.ranks.rank
    total_heads, heads = module.num_heads, module.num_heads // size
    first = rank * heads

    @functools.wraps(module.forward)
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched, batch_first = query.dim() == 3, module.batch_first and query.dim() == 3
        cut_dim = cuts.output
        if batch_first and cut_dim in (0, 1):
            cut_dim = 1 - cut_dim
        entered = _entered(boundary, cuts, query, key, value)
        q_NhLD, k_NhSD, v_NhSD = _projected(module, entered, heads, batch_first=batch_first)
        rows = q_NhLD.shape[0]
        mask = _float_mask(attn_mask, query.dtype)
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (rows, total_heads)).narrow(1, first, heads)
        causal = is_causal and key_padding_mask is None and not need_weights
        padding = _float_mask(key_padding_mask, query.dtype)
        if padding is not None:
            padding = padding.reshape(rows, 1, 1, -1)
            mask = padding if mask is None else mask + padding
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            y_NhLD, weights = _weighted(q_NhLD, k_NhSD, v_NhSD, mask, dropout)
        else:
            y_NhLD = F.scaled_dot_product_attention(
                *(q_NhLD, k_NhSD, v_NhSD, None if causal else mask), dropout, is_causal=causal
            )
        # In memory time is outermost, as in what torch computes: dropout draws in that order.
        y_LNF = y_NhLD.permute(2, 0, 1, 3).flatten(2)
        y = F.linear(y_LNF if batched else y_LNF.squeeze(1), module.out_proj.weight)
        output = _of_each_position(boundary.leave, y, cut_dim, cuts.stack)
        if module.out_proj.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]: without bias
            output = output + module.out_proj.bias
        if batch_first:
            output = output.transpose(0, 1)
        if weights is not None:
            weights = _whole_weights(weights, boundary, cuts.stack, average=average_attn_weights)
            weights = weights if batched else weights.squeeze(0)
        return output, weights

    module.forward = forward
    # TransformerEncoderLayer goes round the forward of modules that have no hooks.
    module.register_forward_pre_hook(lambda *_: None)


def _whole_weights(
    weights_NhLS: Tensor, boundary: Boundary, stack: str, *, average: bool
) -> Tensor:
    """Return the attention weights of all heads, or their average."""
    size = boundary.ranks.size
    if average:
        mean_NLS = weights_NhLS.mean(1) / size
        return _of_each_position(boundary.leave, mean_NLS, None, f"{stack}.<weights>")
    boundary.lengths[f"{stack}.<heads>"] = weights_NhLS.shape[1] * size
    return _of_each_position(boundary.gather, weights_NhLS, 1, f"{stack}.<heads>")


def _of_each_position(convert: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """Convert an activation; of a sequence that ranks share, the slice that it has."""
    if type(x) is Tensor or (on_slice := getattr(x, "of_each_position", None)) is None:
        return convert(x, *args)
    return on_slice(lambda local: convert(local, *args))


def _entered(
    boundary: Boundary, cuts: AttentionCuts, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Bring what is one tensor in once, so that its gradient is summed once."""
    held = [(query, _of_each_position(boundary.enter, query, cuts.query, cuts.stack))]

    def enter(x: Tensor, dim: int | None) -> Tensor:
        for original, already in held:
            if original is x:
                return already
        held.append((x, _of_each_position(boundary.enter, x, dim, cuts.stack)))
        return held[-1][1]

    return held[0][1], enter(key, cuts.key), enter(value, cuts.value)


def _projected(
    module: nn.MultiheadAttention,
    given: tuple[Tensor, Tensor, Tensor],
    heads: int,
    *,
    batch_first: bool,
) -> list[Tensor]:
    """Return queries, keys and values as (batch, heads, length, head features)."""
    weights = module.in_proj_weight.chunk(3)
    bias = module.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)  # pyright: ignore[reportUnnecessaryComparison]: without bias
    found: list[Tensor] = []
    for x, weight, each in zip(given, weights, biases, strict=True):
        x_NLF = x if batch_first else x.transpose(0, 1) if x.dim() == 3 else x.unsqueeze(0)
        found.append(F.linear(x_NLF, weight, each).unflatten(-1, (heads, -1)).transpose(1, 2))
    return found


def _weighted(
    q_NhLD: Tensor, k_NhSD: Tensor, v_NhSD: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    scores = (q_NhLD * math.sqrt(1.0 / q_NhLD.shape[-1])) @ k_NhSD.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return weights @ v_NhSD, weights


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
