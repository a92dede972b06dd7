"""Models of two sequences, of text and of an image, that attend to both at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, HEADS, VOCABULARY, TEXT, MOST = 32, 4, 48, 5, 64


def _heads(x_BSF: Tensor) -> Tensor:
    return x_BSF.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def _places(length: int) -> Tensor:
    return torch.outer(torch.arange(length).double(), 0.3 ** torch.arange(FEATURES // HEADS))


class Joint(nn.Module):
    """Attention with weights of its own for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.of_text, self.out_text = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(32, FEATURES)

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        both = zip(self.of_text(text).chunk(3, -1), self.qkv(image).chunk(3, -1), strict=True)
        q, k, v = (torch.cat([_heads(t), _heads(x)], dim=2) for t, x in both)
        places = _places(q.shape[2])
        q, k = (x * places.cos() + x.roll(1, -1) * places.sin() for x in (q, k))
        made = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        text_made, image_made = made.split_with_sizes([text.shape[1], image.shape[1]], dim=1)
        return self.out_text(text_made), self.out(image_made)


class Double(nn.Module):
    """A block of two streams, which is given the image first and returns the text first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_text = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
        self.attention = Joint()
        self.up, self.down = nn.Linear(FEATURES, 40), nn.Linear(40, FEATURES)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        text_made, image_made = self.attention(self.norm_text(text), self.norm(image))
        image = image + image_made
        return text + text_made, image + self.down(F.gelu(self.up(image)))


class Single(nn.Module):
    """A block that joins both by itself, and multiplies queries with keys under a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([text, image], dim=1)
        q, k, v = (_heads(x) for x in self.qkv(self.norm(joined)).chunk(3, -1))
        length = joined.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        hidden[:, :TEXT] = False
        weights = (q @ k.mT * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
        joined = joined + self.out((weights @ v).transpose(1, 2).flatten(2))
        return joined[:, : text.shape[1]], joined[:, text.shape[1] :]


class Mixed(nn.Module):
    """Blocks of two streams, then of one, as models of images have them."""

    def __init__(self, num_double: int, num_single: int) -> None:
        super().__init__()
        self.embed, self.words = nn.Embedding(VOCABULARY, 32), nn.Embedding(VOCABULARY, FEATURES)
        self.double_blocks = nn.ModuleList(Double() for _ in range(num_double))
        self.single_blocks = nn.ModuleList(Single() for _ in range(num_single))
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        image, text = self.embed(input_ids), self.words(input_ids[:, :TEXT])
        for block in (*self.double_blocks, *self.single_blocks):
            text, image = block(image, text)
        image = image + text.mean(1, keepdim=True)
        logits = self.head(self.norm(image))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Prefixed(nn.Module):
    """Causal attention to trained keys and values before a sequence, as prefixes are tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.prefix = nn.Parameter(torch.randn(2, 1, HEADS, TEXT, FEATURES // HEADS))

    def forward(self, x_BSF: Tensor) -> Tensor:
        q, k, v = (_heads(x) for x in self.qkv(x_BSF).chunk(3, -1))
        k, v = (
            torch.cat([each.expand(len(q), -1, -1, -1), x], dim=2)
            for each, x in zip(self.prefix, (k, v), strict=True)
        )
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(TEXT)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(made.transpose(1, 2).flatten(2))


class Registers(nn.Module):
    """Attention to tokens of its own, which are put before a sequence and taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.tokens = nn.Parameter(torch.randn(1, TEXT, FEATURES))

    def forward(self, x_BSF: Tensor) -> Tensor:
        joined = torch.cat([self.tokens.expand(len(x_BSF), -1, -1), x_BSF], dim=1)
        q, k, v = (_heads(x) for x in self.qkv(joined).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).flatten(2))[:, TEXT:]


class Shifted(nn.Module):
    """Attention with queries that are mixed with those of the position before."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.rate = nn.Parameter(torch.rand(FEATURES))

    def forward(self, x_BSF: Tensor) -> Tensor:
        before = F.pad(x_BSF, (0, 0, 1, 0))[:, :-1]
        mixed = before * self.rate + x_BSF * (1 - self.rate)
        q, k, v = (_heads(x) for x in self.qkv(mixed).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).flatten(2))


BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "double": lambda: Mixed(2, 0),
    "single": lambda: Mixed(0, 2),
    "mixed": lambda: Mixed(2, 2),
}
ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "prefixed": Prefixed,
    "registers": Registers,
    "shifted": Shifted,
}
