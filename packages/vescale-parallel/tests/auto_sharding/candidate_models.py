"""Layers whose parameters are cut, each as models write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

functional = nn.functional


class Mlp(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class GatedMlp(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Attention(nn.Module):
    """Fused projection of q, k and v, with fewer key heads if asked."""

    def __init__(self, heads: int = 4, key_heads: int = 4, features: int = 6) -> None:
        super().__init__()
        self.heads, self.key_heads, self.features = heads, key_heads, features
        width = heads * features
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, width + 2 * key_heads * features)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = (self.heads, self.key_heads, self.key_heads)
        parts = self.qkv(self.norm(x)).split([n * self.features for n in counts], dim=-1)
        q, k, v = (
            part.unflatten(-1, (n, self.features)).transpose(1, 2)
            for part, n in zip(parts, counts, strict=True)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class OneKeyHead(nn.Module):
    """Fused projection of several queries, one key and one value, chosen by slices or lists."""

    def __init__(self, *, by_list: bool = False) -> None:
        super().__init__()
        self.chosen: list[Any] = [[-2], [-1]] if by_list else [slice(-2, -1), slice(-1, None)]
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 36), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 6))
        kv = [heads[:, :, each] for each in self.chosen]
        q, k, v = (each.transpose(1, 2) for each in (heads[:, :, :-2], *kv))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class GroupedQueries(nn.Module):
    """Separate projections, fewer key heads, norms of each head, and scores by hand."""

    def __init__(self, heads: int = 8, key_heads: int = 4, features: int = 6) -> None:
        super().__init__()
        self.key_heads, self.features = key_heads, features
        width, self.groups = heads * features, heads // key_heads
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, key_heads * features)
        self.v = nn.Linear(width, key_heads * features)
        self.q_norm = nn.LayerNorm(features)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (m(h).unflatten(-1, (-1, self.features)) for m in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.groups, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", self.q_norm(q), k).softmax(-1)
        return x + self.out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2))


class Experts(nn.Module):
    """Experts as two tensors of three dimensions, each token to all of them, weighted."""

    def __init__(self, experts: int = 4, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = x.expand(self.up.shape[0], *x.shape)
        return (torch.bmm(functional.silu(torch.bmm(tokens, self.up)), self.down)
                * weights.T.unsqueeze(-1)).sum(0)  # fmt: skip


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        return self.experts(tokens, self.router(tokens).softmax(-1)).view_as(x)
