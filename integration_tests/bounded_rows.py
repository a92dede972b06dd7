"""Models that are given the elements of all rows in one tensor, and where every row begins.

Bags of words, of a table or of several as recommenders have them, texts behind each other with
``cu_seqlens``, sets of points. Rows have from one to five elements, or none, by chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, CLASSES = 50, 8, 4
TABLES = (30, 20, 10)


@dataclass(frozen=True)
class Row:
    """One row of a batch: elements for each table, with weights, features, and a label."""

    ids: tuple[Tensor, ...]
    weights: Tensor
    features: Tensor
    label: int


def rows_of(step: int, count: int, *, least: int = 1, most: int = 5) -> list[Row]:
    """Return the rows of a global batch."""
    generator = torch.Generator().manual_seed(step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found: list[Row] = []
    for _ in range(count):
        lengths = [number(least, most + 1) for _ in TABLES]
        ids = [
            torch.randint(0, size, (length,), generator=generator)
            for size, length in zip(TABLES, lengths, strict=True)
        ]
        weights = torch.rand(lengths[0], generator=generator, dtype=torch.float64)
        features = torch.rand(5, generator=generator, dtype=torch.float64)
        found.append(Row(tuple(ids), weights, features, number(0, CLASSES)))
    return found


def lengths_of(rows: Sequence[Row], table: int = 0) -> Tensor:
    return torch.tensor([len(row.ids[table]) for row in rows])


def edges_of(rows: Sequence[Row], table: int = 0) -> Tensor:
    return F.pad(lengths_of(rows, table).cumsum(0), (1, 0))


def joined(rows: Sequence[Row], table: int = 0) -> Tensor:
    return torch.cat([row.ids[table] for row in rows])


def labels_of(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row.label for row in rows])


class Blocks(nn.Module):
    """An embedding, blocks for a pipeline, and a head."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def between(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


class Words(Blocks):
    """Bags of words, as torch's own tutorial on texts has them."""

    embedding: nn.EmbeddingBag

    def __init__(self, **options: Any) -> None:
        super().__init__(nn.EmbeddingBag(WORDS, WIDTH, **options))

    def forward(self, text: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.between(self.embedding(text, offsets)), labels)


class Weighted(Words):
    def forward(self, text: Tensor, weights: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.embedding(text, offsets, per_sample_weights=weights)
        return self.loss(self.between(x), labels)


class Dropped(Words):
    def forward(self, text: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.embedding(text, offsets), 0.5, self.training)
        return self.loss(self.between(x), labels)


class Normalized(Words):
    """Rows depend on each other behind the bags."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, text: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.between(self.norm(self.embedding(text, offsets))), labels)


class Contrasted(Words):
    """Rows depend on each other in the model's own code, which is given where they begin."""

    def forward(self, text: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        x = self.between(self.embedding(text, offsets))
        return F.cross_entropy(x @ x.T, torch.arange(len(x)))


class Segments(Words):
    def forward(self, values: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        every = F.embedding(values, self.embedding.weight)
        x = torch.segment_reduce(every, "mean", lengths=lengths)
        return self.loss(self.between(x), labels)


class Spoken(Blocks):
    """Frames of all rows, and what was said in them, one row's letters behind another's."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, WIDTH))
        self.head = nn.Linear(WIDTH, TABLES[0] + 1)

    def forward(
        self, frames: Tensor, letters: Tensor, num_frames: Tensor, num_letters: Tensor
    ) -> Tensor:
        scores = self.head(self.between(self.embedding(frames))).log_softmax(-1)
        scores = scores.transpose(0, 1)  # (frames, rows, letters)
        return F.ctc_loss(scores, letters, num_frames, num_letters)


class Recommender(nn.Module):
    """Bags of several tables beside features, and products of all pairs of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, WIDTH, mode="sum") for n in TABLES)
        self.bottom = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(WIDTH + 6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, features: Tensor, offsets: Any, ids: Any, labels: Tensor) -> Tensor:
        x = self.bottom(features)
        bags = [table(ids[k], offsets[k]) for k, table in enumerate(self.tables)]
        every = torch.stack([x, *bags], 1)  # (rows, 1 + tables, width)
        pairs = [*itertools.combinations(range(4), 2)]
        first, second = (torch.tensor(each) for each in zip(*pairs, strict=True))
        products = (every @ every.transpose(1, 2))[:, first, second]
        found = self.top(torch.cat([x, products], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(found, labels.double() / CLASSES)


class Attending(nn.Module):
    """Attention over texts that lie behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        found: list[Tensor] = []
        for start, stop in itertools.pairwise(cu_seqlens.tolist()):
            q, k, v = self.qkv(x[None, start:stop]).chunk(3, -1)
            found.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0])
        return x + self.out(torch.cat(found))


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Attending() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def states(self, ids: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.embedding(ids) + self.embedding.weight[positions]
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.head(x)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        return F.cross_entropy(self.states(ids, positions, cu_seqlens), labels)


class Scored(Texts):
    """A mean over tokens, of which rows have other numbers, and which is not counted."""

    def forward(
        self,
        ids: Tensor,
        labels: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        return F.mse_loss(self.states(ids, positions, cu_seqlens)[:, 0], labels.double())


class Points(Blocks):
    """Sets of points, with where each ends."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, WIDTH))

    def forward(self, points: Tensor, features: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        x = self.between(self.embedding(torch.cat([points, features], 1)))
        parts = x.split(torch.diff(ends, prepend=ends.new_zeros(1)).tolist())
        return self.loss(torch.stack([part.amax(0) for part in parts]), labels)


class Owned(Points):
    """Sets of points, with the set that each is of."""

    def forward(self, points: Tensor, features: Tensor, owners: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.between(self.embedding(torch.cat([points, features], 1)))
        sums = x.new_zeros(int(owners.max()) + 1, WIDTH)
        return self.loss(sums.index_add(0, owners, x), labels)


def _bags(rows: Sequence[Row]) -> tuple[Any, ...]:
    return joined(rows), edges_of(rows)[:-1], labels_of(rows)


def _tables(rows: Sequence[Row], *, stacked: bool = False) -> tuple[Any, ...]:
    tables = range(len(TABLES))
    offsets = [edges_of(rows, table)[:-1] for table in tables]
    ids = [joined(rows, table) for table in tables]
    features = torch.stack([row.features for row in rows])
    return features, torch.stack(offsets) if stacked else offsets, ids, labels_of(rows)


def _texts(rows: Sequence[Row]) -> tuple[Any, ...]:
    labels = torch.cat([row.ids[0].roll(-1) for row in rows])
    positions = torch.cat([torch.arange(len(row.ids[0])) for row in rows])
    longest = int(lengths_of(rows).max())
    return joined(rows), labels, positions, edges_of(rows).int(), longest


def _speech(rows: Sequence[Row]) -> tuple[Any, ...]:
    frames = [row.features.outer(torch.arange(12).double().sin()).T for row in rows]
    num_frames = torch.tensor([12 - row.label for row in rows])
    return torch.stack(frames), joined(rows) + 1, num_frames, lengths_of(rows)


def _points(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    table = torch.rand(WORDS, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = table[joined(rows)]
    return found[:, :3], found[:, 3:]


Batch = Callable[[Sequence[Row]], tuple[Any, ...]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "words": (Words, _bags),
    "both ends": (
        lambda: Words(include_last_offset=True),
        lambda rows: (joined(rows), edges_of(rows), labels_of(rows)),
    ),
    "weighted": (
        lambda: Weighted(mode="sum"),
        lambda rows: (
            joined(rows),
            torch.cat([row.weights for row in rows]),
            *_bags(rows)[1:],
        ),
    ),
    "segments": (Segments, lambda rows: (joined(rows), lengths_of(rows), labels_of(rows))),
    "speech": (Spoken, _speech),
    "recommender": (Recommender, _tables),
    "stacked": (Recommender, lambda rows: _tables(rows, stacked=True)),
    "texts": (Texts, _texts),
    "points": (Points, lambda rows: (*_points(rows), edges_of(rows)[1:], labels_of(rows))),
    "owned": (
        Owned,
        lambda rows: (
            *_points(rows),
            torch.arange(len(rows)).repeat_interleave(lengths_of(rows)),
            labels_of(rows),
        ),
    ),
    "dropped": (Dropped, _bags),
    "normalized": (Normalized, _bags),
    "contrasted": (Contrasted, _bags),
    "scored": (Scored, _texts),
}


def build(name: str) -> nn.Module:
    """Return a model in float64, the same each time."""
    torch.manual_seed(3)
    return MODELS[name][0]().double()


def batch_of(name: str, rows: Sequence[Row]) -> tuple[Any, ...]:
    """Return what a model is called with."""
    return MODELS[name][1](rows)
