"""The models that plans are compared on, tiny and with every awkward feature."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ReturnsLoss(nn.Module):
    """A causal language model whose forward takes a batch and returns the loss.

    transformers computes its loss in float32 whatever the model's dtype; a float64 model
    gets a float64 loss here, so that it can be compared to more than float32's digits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        if next(self.model.parameters()).dtype != torch.float64:
            return self.model(**batch).loss
        logits_BSV = self.model(input_ids=batch["input_ids"]).logits
        labels_BS = batch["labels"]
        return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), labels_BS[:, 1:].flatten())


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BSF: Tensor) -> Tensor:
        batch, length, _ = x_BSF.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x_BSF).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x_BSF: Tensor) -> tuple[Tensor, None]:
        x_BSF = x_BSF + self.attention(self.norm(x_BSF))
        return x_BSF + self.gain * self.mlp(x_BSF), None


class HandWritten(nn.Module):
    """Fused QKV, a scalar parameter per block, a root parameter of one row, odd sizes, tuples."""

    def __init__(
        self, vocabulary: int = 37, width: int = 24, heads: int = 4, depth: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids_BS, labels_BS = batch["input_ids"], batch["labels"]
        x_BSF = self.embed(ids_BS) + self.positions[:, : ids_BS.shape[1]]
        for block in self.blocks:
            x_BSF, _ = block(x_BSF)
        logits_BSV = self.head(self.norm(x_BSF))
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def build(name: str) -> nn.Module:
    """Return a freshly initialised tiny model, random numbers from the default generator."""
    if name == "hand_written":
        return HandWritten()
    # Imported here: rank processes that test other things need not load it.
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
    }  # fmt: skip
    sizes = {
        "llama": small,
        # Norms on queries and keys.
        "qwen3": {**small, "head_dim": 8},
        # Tied and scaled embeddings, heads wider than the model.
        "gemma": {**small, "head_dim": 16},
        "gpt2": {
            "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    }[name]  # fmt: skip
    return ReturnsLoss(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)))


def batches(
    steps: int, rows: int = 8, length: int = 12, *, uneven: bool = False
) -> list[dict[str, Tensor]]:
    """Return random batches of one device; ``uneven`` ignores ever more targets by row."""
    generator = torch.Generator().manual_seed(1)
    found: list[dict[str, Tensor]] = []
    for _ in range(steps):
        ids_BS = torch.randint(0, 37, (rows, length), generator=generator)
        labels_BS = ids_BS.clone()
        if uneven:
            for row in range(rows):
                labels_BS[row, : row + 2] = -100
        found.append({"input_ids": ids_BS, "labels": labels_BS})
    return found
