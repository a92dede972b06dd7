"""Small models whose structure a planner may get wrong, each with a batch and its loss inside."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, VOCABULARY = 8, 8, 16


class Loss(nn.Module):
    """Any module of rows of features, with a loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class Stack(nn.Module):
    """Layers between an embedding and a head; ``run`` says how they are run."""

    def __init__(self, layers: nn.Module, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = layers
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.run = run

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.run(self.layers, self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _in_a_row(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _residual(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = x + layer(x)
    return x


def _twice(layers: Any, x: Tensor) -> Tensor:
    return _in_a_row(layers, _in_a_row(layers, x))


def _backwards(layers: Any, x: Tensor) -> Tensor:
    return _in_a_row(reversed(layers), x)


def _nested(layers: Any, x: Tensor) -> Tensor:
    return _in_a_row([layer for group in layers for layer in group], x)


def _named(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer["down"](layer["up"](x).relu())
    return x


def _mixed(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x) if isinstance(layer, nn.Linear) else layer(x, x)[0]
    return x


class Pair(nn.Module):
    """Another signature than that of a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) + y, y


class EncoderDecoder(nn.Module):
    """Two lists of blocks, of which the second sees the last of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = _linears(2), _linears(2)

    def forward(self, ids: Tensor) -> Tensor:
        x = seen = _in_a_row(self.encoder, self.embed(ids))
        for layer in self.decoder:
            x = layer(x) + seen
        return x.square().mean()


class OnlyBuffers(nn.Module):
    """Nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        return (x * self.scale).square().mean()


def _linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


def _features() -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def _ids() -> Tensor:
    return torch.arange(ROWS * 4).view(ROWS, 4) % VOCABULARY


def _images() -> Tensor:
    return torch.linspace(-1, 1, ROWS * 3 * 36).view(ROWS, 3, 6, 6)


def _tied() -> nn.Module:
    model = Stack(_linears(4), _in_a_row)
    model.head.weight = model.embed.weight
    return model


def _convolutions() -> nn.Module:
    return Loss(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten()
        )
    )


def _wide() -> nn.Module:
    return Loss(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))


def _with_activations() -> nn.Module:
    named = [("first", nn.Linear(WIDTH, 16)), ("act", nn.ReLU()), ("last", nn.Linear(16, WIDTH))]
    return Loss(nn.Sequential(OrderedDict[str, nn.Module](named)))


def _dicts() -> nn.Module:
    def block() -> nn.Module:
        return nn.ModuleDict({"up": nn.Linear(WIDTH, 16), "down": nn.Linear(16, WIDTH)})

    return Stack(nn.ModuleList(block() for _ in range(4)), _named)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "sequential": (_wide, _features),
    "activations between": (_with_activations, _features),
    "dicts for blocks": (_dicts, _ids),
    "blocks in a row": (lambda: Stack(_linears(4), _in_a_row), _ids),
    "residual outside": (lambda: Stack(_linears(4), _residual), _ids),
    "nested lists": (
        lambda: Stack(nn.ModuleList(_linears(2) for _ in range(2)), _nested),
        _ids,
    ),
    "encoder and decoder": (EncoderDecoder, _ids),
    "tied": (_tied, _ids),
    "blocks called twice": (lambda: Stack(_linears(4), _twice), _ids),
    "blocks backwards": (lambda: Stack(_linears(4), _backwards), _ids),
    "other signatures": (
        lambda: Stack(nn.ModuleList([*_linears(1), Pair(), *_linears(1), Pair()]), _mixed),
        _ids,
    ),
    "no blocks": (lambda: Loss(nn.Linear(WIDTH, WIDTH)), _features),
    "convolutions": (_convolutions, _images),
    "only buffers": (OnlyBuffers, _features),
}
