"""Modules that hand on a dict and put what they compute into it, as sentence embedders do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # noqa: PLC2701 (no public name)

import vescale
from vescale_testing import World

from .plans import DP, PARTS, PP, TP, ZERO, Constraints
from .programs import WIDTH, Block, assert_right, sgd
from .training import whole

Features = dict[str, Tensor]
Batch = tuple[list[Features], Tensor]
ROWS, TOKENS, WORDS = 8, 5, 30


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, features: Features) -> Features:
        x = self.embed(features["ids"])
        for layer in self.layers:
            x = layer(x)
        features["tokens"] = x
        return features


class Pooled(nn.Module):
    def forward(self, features: Features) -> Features:
        weights = features["mask"].unsqueeze(-1)
        total = (features["tokens"] * weights).sum(1)
        features["sentence"] = total / weights.sum(1).clamp(min=1e-9)
        return features


class Embedder(nn.Module):
    """Embeds one text a row and, of pairs, has similarities be what the labels say."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Encoder(), Pooled())

    def forward(self, features: Sequence[Features], labels: Tensor) -> Tensor:
        sentences = [self.model(each)["sentence"] for each in features]
        if len(sentences) == 1:
            return F.mse_loss(sentences[0].mean(-1), labels)
        return F.mse_loss(torch.cosine_similarity(*sentences), labels)


class Contrast(Embedder):
    """The other texts of the batch are what a text does not belong to."""

    def forward(self, features: Sequence[Features], labels: Tensor) -> Tensor:
        one, other = (F.normalize(self.model(each)["sentence"]) for each in features)
        scores = one @ other.T / 0.05
        return F.cross_entropy(scores, torch.arange(len(scores)))


LAYERS = [f"model.0.layers.{index}" for index in range(4)]
PIPELINE: Constraints = {PP: 2, PARTS: 2}
PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "accumulation": {DP: 2, "batch.gradient_accumulation": 2},
    "tp": {TP: 2},
    "pp": PIPELINE,
}


def batches(num_texts: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    given: list[Batch] = []
    for _ in range(3):
        features: list[Features] = []
        for _ in range(num_texts):
            lengths = torch.randint(1, TOKENS + 1, (ROWS, 1), generator=generator)
            ids = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
            features.append({"ids": ids, "mask": (torch.arange(TOKENS) < lengths).double()})
        given.append((features, torch.rand(ROWS, generator=generator).double()))
    return given


def part(batch: Batch, rank: int, size: int) -> Batch:
    return cast(Batch, pytree.tree_map(lambda x: x.chunk(size)[rank], batch))


def trained(kind: type[Embedder], num_texts: int, constraints: Constraints | None) -> list[Tensor]:
    """Return the losses of three steps, and the parameters."""
    torch.manual_seed(0)
    model: Any = kind().double()
    rank, size = 0, 1
    if constraints is None:
        optimizer = sgd(model)
    else:
        example = batches(num_texts)[0]
        plan = vescale.generate_plan(model, constraints, example_batch=example)
        model, optimizer = vescale.parallelize(plan, model, sgd)
        assert all(list(each) == ["ids", "mask"] for each in example[0])  # as it was given
        rank, size = vescale.data_parallel_rank(model), plan.data_parallel.size
    losses: list[Tensor] = []
    for batch in batches(num_texts):
        loss = model(*part(batch, rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss.detach()))
    return [*losses, *(whole(p.detach()).clone() for p in model.parameters())]


def both(
    kind: type[Embedder], num_texts: int, constraints: Constraints
) -> tuple[list[Tensor], list[Tensor]]:
    return trained(kind, num_texts, constraints), trained(kind, num_texts, None)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_one_text_a_row_trains_as_on_one_device(world2: World, plan: str) -> None:
    for answers in world2.run(both, Embedder, 1, PLANS[plan]):
        assert_right(answers)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_pairs_train_as_on_one_device(world2: World, plan: str) -> None:
    constraints = PLANS[plan]
    if plan == "pp":  # else the whole encoder, which is called twice, would be the block
        constraints = {**constraints, "pipeline_parallel.block_calls": LAYERS * 2}
    for answers in world2.run(both, Embedder, 2, constraints):
        assert_right(answers)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "zero3", "tp"])
def test_contrast_of_pairs_trains_as_on_one_device(world2: World, plan: str) -> None:
    for answers in world2.run(both, Contrast, 2, PLANS[plan]):
        assert_right(answers)
