"""The transformer that the rows were measured on, one operator where stacks have one kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedGate(torch.autograd.Function):
    """``silu(gate) * up`` that keeps its inputs and nothing in between, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return grads[0] * up * slope, grads[0] * gate * sigmoid


class Block(nn.Module):
    """Attention and MLP; a norm is one operator, whatever it is called."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        *,
        gated: bool,
        bias: bool,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.width = hidden // heads
        keys = kv_heads * self.width
        self.norm1 = nn.LayerNorm(hidden, bias=bias)
        self.norm2 = nn.LayerNorm(hidden, bias=bias)
        self.q_proj = nn.Linear(hidden, hidden, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(hidden, hidden, bias=bias)
        self.gate = nn.Linear(hidden, ffn, bias=bias) if gated else None
        self.up = nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        normed_BSD = self.norm1(x_BSD)
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (
            each(normed_BSD).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for each in projections
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BSD = x_BSD + self.o_proj(attended.transpose(1, 2).flatten(-2))
        normed_BSD = self.norm2(x_BSD)
        up = self.up(normed_BSD)
        return x_BSD + self.down(self._gated(normed_BSD, up))

    def _gated(self, normed_BSD: Tensor, up: Tensor) -> Tensor:
        if self.gate is None:
            return F.gelu(up)
        gate = self.gate(normed_BSD)
        return FusedGate.apply(gate, up) if self.fused else F.silu(gate) * up


class Decoder(nn.Module):
    """A language model that returns its loss; ``shape`` is an entry of ``models`` in rows.json.

    ``fused`` says whether the gate of an MLP is one kernel.
    """

    def __init__(self, shape: dict[str, Any], layers: int, *, fused: bool = False) -> None:
        super().__init__()
        hidden, gated = shape["hidden"], shape["gated"]
        self.embed = nn.Embedding(shape["vocab"], hidden)
        sizes = shape["heads"], shape["kv_heads"], shape["ffn"]
        self.layers = nn.ModuleList(
            Block(hidden, *sizes, gated=gated, bias=not gated, fused=fused) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden, bias=not gated)
        self.head = nn.Linear(hidden, shape["vocab"], bias=False)
        if shape["tied"]:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSD = self.embed(input_ids)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        logits = self.head(self.norm(x_BSD)).flatten(0, 1)
        return F.cross_entropy(logits.float(), labels.flatten())


def example(length: int) -> dict[str, Tensor]:
    """Return one row of tokens."""
    ids_BS = torch.zeros(1, length, dtype=torch.long)
    return {"input_ids": ids_BS, "labels": ids_BS}
