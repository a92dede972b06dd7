"""Pipelines of models of which a batch calls some lists of blocks only: text without pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale

from .plans import DP, PARTS, PP, TP

WIDTH, VOCABULARY = 8, 11


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Sees(nn.Module):
    """A tower for pictures, which come before the text, and a language model."""

    def __init__(self, width_of_tower: int) -> None:
        super().__init__()
        self.tower = nn.ModuleList(_Block(width_of_tower) for _ in range(3))
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Block(32) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor, pictures: Tensor | None = None) -> Tensor:
        x = self.table(ids)
        if pictures is not None:
            seen = pictures
            for block in self.tower:
                seen = block(seen)
            x = x + seen.mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x)
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _batch(*, has_pictures: bool) -> dict[str, Any]:
    ids = torch.arange(40).view(8, 5) % VOCABULARY
    batch = {"ids": ids, "labels": (ids + 1) % VOCABULARY}
    return batch | ({"pictures": torch.randn(8, 3, WIDTH)} if has_pictures else {})


@pytest.mark.by_day("False-32")
@pytest.mark.parametrize("width_of_tower", [32, 512])  # the second is most of the model
@pytest.mark.parametrize("has_pictures", [False, True])
def test_a_plan_for_text_cuts_the_language_model(width_of_tower: int, has_pictures: bool) -> None:
    model = Sees(width_of_tower)
    sizes = {PP: 2, PARTS: 4, DP: 1, TP: 1}
    plan = vescale.generate_plan(
        model, sizes, world_size=2, cluster="cpu", example_batch=_batch(has_pictures=False)
    )
    assert plan.pipeline_parallel.block_calls == tuple(f"layers.{i}" for i in range(4))
    # Pictures that come later are seen on the first stage.
    report = vescale.verify(
        plan, lambda: Sees(width_of_tower), _batch(has_pictures=has_pictures), dtype=torch.float64
    )
    assert report.passed, report


def test_a_plan_for_both_cuts_both() -> None:
    sizes = {PP: 2, PARTS: 4, DP: 1, TP: 1}
    plan = vescale.generate_plan(
        Sees(32), sizes, world_size=2, cluster="cpu", example_batch=_batch(has_pictures=True)
    )
    assert plan.pipeline_parallel.block_calls == ()
