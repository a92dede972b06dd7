"""Models whose blocks are an attention and an MLP apart, of which a module adds the residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .families import VOCABULARY

WIDTH, HEADS, DEPTH = 32, 4, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, _ = x_BSF.shape
        heads = (
            each.view(rows, length, HEADS, -1).transpose(1, 2)
            for each in self.qkv(self.norm(x_BSF)).chunk(3, -1)
        )
        made = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(made.transpose(1, 2).reshape(rows, length, WIDTH))


class WrittenOut(Attention):
    """Attention of products, with a mask of the length that it sees."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, _ = x_BSF.shape
        q, k, v = (
            each.view(rows, length, HEADS, -1).transpose(1, 2)
            for each in self.qkv(self.norm(x_BSF)).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        behind = torch.ones(length, length, dtype=torch.bool).triu(1)
        made = scores.masked_fill(behind, -torch.inf).softmax(-1) @ v
        return self.out(made.transpose(1, 2).reshape(rows, length, WIDTH))


@dataclass
class Scores:
    """What attention returns besides, for a program that looks at it."""

    before: Tensor
    weights: Tensor
    keys: tuple[Tensor, Tensor] | None = None


class Attend(nn.Module):
    """The products alone, in a module that is given heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Scores]:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * (WIDTH // HEADS) ** -0.5
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(behind, -torch.inf).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", weights, v), Scores(scores.clone(), weights)


class Recording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.attend, self.out = Attend(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> tuple[Tensor, Scores]:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.qkv(self.norm(x_BSF)).chunk(3, -1)
        )
        made, scores = self.attend(q, k, v)
        scores.keys = (k, v)
        return self.out(made.transpose(1, 2).flatten(2)), scores


@dataclass
class Record:
    hidden: list[Tensor]
    scores: list[Scores]
    last: Tensor | None = None


class Recorded(nn.Module):
    """Nested layers that return all that was computed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Recording(), mlp()]) for _ in range(DEPTH))

    def forward(self, x_BSF: Tensor) -> tuple[Tensor, Record]:
        layers: Any = self.layers
        record = Record([], [])
        for attend, feed in layers:
            made, scores = attend(x_BSF)
            record.scores.append(scores)
            x_BSF = made + x_BSF
            x_BSF = feed(x_BSF) + x_BSF
            record.hidden.append(x_BSF)
        record.last = x_BSF
        return x_BSF, record


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)
    )


class Nested(nn.Module):
    """``for attend, feed in layers``, with a norm behind them."""

    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.ModuleList([attention(), mlp()]) for _ in range(DEPTH))

    def forward(self, x_BSF: Tensor) -> Tensor:
        layers: Any = self.layers
        for attend, feed in layers:
            x_BSF = attend(x_BSF) + x_BSF
            x_BSF = feed(x_BSF) + x_BSF
        return self.norm(x_BSF)


class Flat(nn.Module):
    """Layers of two classes by turns in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(each for _ in range(DEPTH) for each in (Attention(), mlp()))

    def forward(self, x_BSF: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSF = x_BSF + layer(x_BSF)
        return x_BSF


class Model(nn.Module):
    def __init__(self, body: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCABULARY, WIDTH), body()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(input_ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OfRecords(Model):
    """A model whose loss has a share of what its layers returned besides."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSF, record = self.body(self.embed(input_ids))
        logits = self.head(x_BSF)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        norms = sum(each.square().mean() for each in record.hidden)
        return loss + 0.01 * norms + 0.1 * record.scores[0].weights.square().mean()


BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "nested": lambda: Model(Nested),
    "flat": lambda: Model(Flat),
    "nested, written out": lambda: Model(lambda: Nested(WrittenOut)),
    "recorded": lambda: OfRecords(Recorded),
}
