"""Models whose attention is written out, in ways that public programs have it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, HEADS, VOCABULARY, MOST = 32, 4, 48, 64


class WithBuffer(nn.Module):
    """Scores under a triangle that a buffer holds, as small models of GPT have them."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.drop, self.drop_out = nn.Dropout(rate), nn.Dropout(rate)
        self.triangle: Tensor
        self.register_buffer("triangle", torch.ones(MOST, MOST).tril()[None, None])

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, features = x_BSF.size()
        q, k, v = self.qkv(x_BSF).split(features, dim=2)
        q, k, v = (x.view(rows, length, HEADS, -1).transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        hidden = self.triangle[:, :, :length, :length] == 0
        weights = self.drop(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1))
        made = (weights @ v).transpose(1, 2).contiguous().view(rows, length, features)
        return self.drop_out(self.out(made))


class Dropping(WithBuffer):
    def __init__(self) -> None:
        super().__init__(0.2)


class ByEinsum(nn.Module):
    """Products by Einstein's sums, and dropout by function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, _ = x_BSF.shape
        q, k, v = (x.view(rows, length, HEADS, -1) for x in self.qkv(x_BSF).chunk(3, -1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.3
        hidden = torch.ones(length, length, dtype=torch.bool, device=x_BSF.device).triu(1)
        weights = scores.masked_fill(hidden, -torch.finfo(scores.dtype).max).softmax(-1)
        weights = F.dropout(weights, 0.1, self.training)
        made = torch.einsum("bhij,bjhd->bihd", weights, v)
        return self.out(made.reshape(rows, length, -1))


class Rotating(nn.Module):
    """Complex rotations, and keys that are repeated for groups of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.k, self.v = nn.Linear(FEATURES, FEATURES // 2), nn.Linear(FEATURES, FEATURES // 2)

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, features = x_BSF.shape
        size = features // HEADS
        angles = torch.outer(torch.arange(length).double(), 0.3 ** torch.arange(size // 2))
        turns = torch.polar(torch.ones_like(angles), angles).view(1, length, 1, -1)
        q = _turned(self.q(x_BSF).view(rows, length, HEADS, size), turns)
        k = _turned(self.k(x_BSF).view(rows, length, HEADS // 2, size), turns)
        v = self.v(x_BSF).view(rows, length, HEADS // 2, size)
        k, v = (
            x[:, :, :, None, :].expand(-1, -1, -1, 2, -1).reshape(rows, length, HEADS, size)
            for x in (k, v)
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        hidden = torch.full((length, length), float("-inf"), dtype=x_BSF.dtype).triu(1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(size) + hidden
        made = torch.matmul(scores.softmax(-1).type_as(x_BSF), v)
        return self.out(made.transpose(1, 2).contiguous().view(rows, length, -1))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class OfKernels(nn.Module):
    """Attention that is linear: a sum over keys, which queries of all positions read."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, _ = x_BSF.shape
        q, k, v = (
            x.view(rows, length, HEADS, -1).transpose(1, 2)
            for x in self.qkv(x_BSF).chunk(3, dim=-1)
        )
        q, k = F.elu(q) + 1, F.elu(k) + 1
        made = q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))
        return self.out(made.transpose(1, 2).flatten(2))


class OfTorch(nn.Module):
    """torch's own attention, under a mask that the module around it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True)

    def forward(self, x_BSF: Tensor) -> Tensor:
        length = x_BSF.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x_BSF.device).triu(1)
        return self.attend(x_BSF, x_BSF, x_BSF, attn_mask=hidden)[0]


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
        self.attention = attention
        self.up, self.down = nn.Linear(FEATURES, 40), nn.Linear(40, FEATURES)

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attention(self.norm(x_BSF))
        return x_BSF + self.down(F.gelu(self.up(self.norm2(x_BSF))))


class Causal(nn.Module):
    """A causal model of blocks with some attention."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, FEATURES), nn.Embedding(MOST, FEATURES)
        self.blocks = nn.ModuleList(Block(make()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BSF = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x_BSF = block(x_BSF)
        logits = self.head(self.norm(x_BSF))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Encoder(nn.Module):
    """torch's own encoder, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, FEATURES)
        layer = nn.TransformerEncoderLayer(FEATURES, HEADS, 40, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        padding = (input_ids > VOCABULARY - 4) & (torch.arange(input_ids.shape[1]) > 1)
        logits = self.head(self.encoder(self.embed(input_ids), src_key_padding_mask=padding))
        return (
            logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )


class Translator(nn.Module):
    """torch's own encoder and decoder, of sequences of two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, FEATURES)
        self.both = nn.Transformer(FEATURES, HEADS, 2, 2, 40, 0.0, batch_first=True)
        self.head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        targets = input_ids if labels is None else labels.clamp(min=0)
        hidden = nn.Transformer.generate_square_subsequent_mask(
            targets.shape[1], dtype=torch.double
        )
        x_BTF = self.both(
            self.embed(input_ids), self.embed(targets), tgt_mask=hidden, tgt_is_causal=True
        )
        logits = self.head(x_BTF)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "with_buffer": lambda: Causal(WithBuffer),
    "dropping": lambda: Causal(Dropping),
    "by_einsum": lambda: Causal(ByEinsum),
    "rotating": lambda: Causal(Rotating),
    "of_kernels": lambda: Causal(OfKernels),
    "of_torch": lambda: Causal(OfTorch),
    "encoder": Encoder,
    "translator": Translator,
}
