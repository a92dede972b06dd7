"""Plans that need forward to return its loss, where it was not seen to: priced, and said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_planner import Cluster, generate_plan

WIDTH, ROWS = 2048, 64
GIVEN: dict[str, Any] = {
    "batch.global_size": ROWS, "tensor_parallel.size": 1, "pipeline_parallel.size": 1
}  # fmt: skip
CLUSTER = replace(Cluster.preset("h100"), reserved_bytes=0, memory_bytes=8 * 2**30)


class Net(nn.Module):
    """Returns its loss if it is given targets; activations are most of its memory."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(8)
            )
            self.norm = norm(WIDTH)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return x if targets is None else F.mse_loss(x, targets)


X = torch.zeros(1, 512, WIDTH, device="meta")


def said(model: nn.Module, example: object, **given: Any) -> list[str]:
    """Return what a plan for two ranks says of others that were priced."""
    plan = generate_plan(
        model, GIVEN | given, world_size=2, cluster=CLUSTER, example_batch=example
    )
    return [each for each in plan.reasons if each.startswith("priced, not chosen")]


def test_accumulation_that_would_be_faster_is_said_with_what_to_give() -> None:
    with_loss = generate_plan(
        Net(), GIVEN, world_size=2, cluster=CLUSTER, example_batch={"x": X, "targets": X}
    )
    assert with_loss.batch.gradient_accumulation > 1
    [found] = said(Net(), {"x": X})
    number = with_loss.batch.gradient_accumulation
    assert f"data parallel 2, gradient accumulation {number}: 0.8" in found
    assert "give an example_batch with which forward returns its loss" in found
    assert f"constrain batch.gradient_accumulation to {number}" in found


def test_nothing_is_said_where_it_is_chosen_constrained_or_impossible() -> None:
    assert not said(Net(), {"x": X, "targets": X})
    assert not said(Net(), {"x": X}, **{"batch.gradient_accumulation": 1})
    assert not said(Net(nn.BatchNorm1d), {"x": X})  # coupled rows are not cut
    roomy = generate_plan(Net(), GIVEN, world_size=2, cluster="h100", example_batch={"x": X})
    assert not any(each.startswith("priced, not chosen") for each in roomy.reasons)
