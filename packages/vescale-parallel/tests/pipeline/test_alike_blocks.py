"""Stages are tried on values, without others' weights, with one outline for alike blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import ParallelPlan, check_pipeline, with_constraints
from vescale_parallel._pipeline import stage_module
from vescale_parallel._pipeline.cuts.forms import form_of
from vescale_parallel._pipeline.cuts.outline import outline_of

PLAN = with_constraints(
    ParallelPlan(), {"pipeline_parallel.size": 2, "pipeline_parallel.microbatches": 2}
)


class Block(nn.Module):
    def __init__(self, number: int, width: int = 8) -> None:
        super().__init__()
        self.number, self.names = number, {"up"}
        self.up = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x)


class Net(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(number) for number in range(depth))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if bool((ids < 0).all().item()):  # asks for values
            x = x * 0
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def test_blocks_that_differ_in_their_number_are_alike() -> None:
    assert form_of(Block(2), "layers.2") == form_of(Block(5), "layers.5")
    assert form_of(Block(2), "layers.2") != form_of(Block(2), "layers.5")
    assert form_of(Block(2), "layers.2") != form_of(Block(2, 1), "layers.2")
    assert form_of(Block(2), "layers.2") != form_of(Block(2).eval(), "layers.2")
    assert form_of(Block(2), "layers.2") != form_of(Block(2).double(), "layers.2")
    other = Block(2)
    other.names = {"down"}
    assert form_of(Block(2), "layers.2") != form_of(other, "layers.2")


def test_alike_blocks_are_run_once_and_forward_may_ask_for_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: list[str] = []

    def counted(skeleton: nn.Module, fqn: str, *given: object) -> object:
        run.append(fqn)
        return outline_of(skeleton, fqn, *given)  # pyright: ignore[reportArgumentType]: of a call

    monkeypatch.setattr(stage_module, "outline_of", counted)
    check_pipeline(PLAN, Net(), torch.zeros(2, 3, dtype=torch.long))
    # The check's own stages, and the run in which the order of calls was seen.
    assert sum("layers" in fqn for fqn in run) <= 4


class ClosedOver(Net):
    def __init__(self) -> None:
        super().__init__()
        first = self.layers[0]
        assert isinstance(first, Block)
        self.to_logits: Callable[[Tensor], Tensor] = lambda x: x @ first.up.weight.t()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.to_logits(x).square().mean()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_of_another_stage_are_not_there(device: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match="that another pipeline stage computes"):
        check_pipeline(PLAN, ClosedOver(), ids)
