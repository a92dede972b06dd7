"""Tiny models that call a block more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .crossing_models import LENGTH, VOCABULARY

WIDTH = 8


class Block(nn.Module):
    """A list of layers inside, as lists of blocks are; ``scale`` differs from call to call."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.dropout(self.mlp(self.norm(x)) * scale)


class Shared(nn.Module):
    """Embeddings, blocks in an order of its own, and a head that is tied to the embedding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout

    def through(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.through(self.embed(input_ids))))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Universal(Shared):
    """One block again and again, with an embedding of the step between its calls."""

    def __init__(self, depth: int, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.block, self.depth = Block(dropout), depth
        self.step = nn.Embedding(depth, WIDTH)

    def through(self, x: Tensor) -> Tensor:
        for index in range(self.depth):
            step = self.step(torch.tensor(index, device=x.device))
            x = self.block(x + step, scale=1 / (1 + index))
        return x


class InTurns(Shared):
    """A list that holds two blocks in turns."""

    def __init__(self, depth: int, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.layers = nn.ModuleList([Block(dropout), Block(dropout)] * (depth // 2))

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class AroundAgain(Shared):
    """A list of blocks that is gone through twice, the last one once more."""

    def __init__(self, depth: int, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.layers = nn.ModuleList(Block(dropout) for _ in range((depth - 1) // 2))

    def through(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.layers[-1](x, scale=0.5)


def albert(groups: int, inner: int, depth: int, dropout: float = 0.0) -> nn.Module:
    """Return transformers' model, whose groups of inner layers are called in a loop."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=8, hidden_size=16, num_hidden_layers=depth,
        num_hidden_groups=groups, num_attention_heads=2, intermediate_size=24,
        inner_group_num=inner, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        max_position_embeddings=LENGTH, pad_token_id=0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    return AlbertForMaskedLM._from_config(config, attn_implementation="eager")


MODELS: dict[str, Callable[..., nn.Module]] = {
    "universal": Universal,
    "in_turns": InTurns,
    "around_again": AroundAgain,
    "albert": lambda *given: albert(1, 1, *given),
    "albert_two_groups": lambda *given: albert(2, 1, *given),
    "albert_inner": lambda *given: albert(1, 2, *given),
    "albert_two_inner": lambda *given: albert(2, 2, *given),
}


def make(name: str, depth: int, dropout: float = 0.0, dtype: Any = torch.float64) -> nn.Module:
    """Return a model with so many calls of blocks or of groups of them."""
    torch.manual_seed(0)
    return MODELS[name](depth, dropout).to(dtype)
