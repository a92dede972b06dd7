"""Models that compute something else in training, made a plan for while they are in evaluation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel import propose_sharding
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._trace.modes import differs_in_training
from vescale_parallel._verify.dry_runs import DryRuns
from vescale_parallel._verify.equivalence import Contradiction, check_plan


class Block(nn.Module):
    """``trained`` names what it does in training alone."""

    def __init__(self, trained: str) -> None:
        super().__init__()
        self.trained = trained
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x_BSF: Tensor) -> Tensor:
        h_BSF = self.norm(x_BSF)
        if self.training and self.trained == "scale before":
            h_BSF = h_BSF * self.scale
        u_BSF = self.up(h_BSF).relu()
        if self.training and self.trained == "mean of features":
            u_BSF = u_BSF - u_BSF.mean(-1, keepdim=True)
        if self.training and self.trained == "twice":
            u_BSF = u_BSF * 2
        if self.trained == "drops":
            u_BSF = F.dropout(self.dropout(u_BSF), 0.1, self.training)
        if self.training and self.trained == "path":
            u_BSF = u_BSF * (torch.rand(len(x_BSF), 1, 1) > 0.5)
        return x_BSF + self.down(u_BSF)


class Model(nn.Module):
    def __init__(self, trained: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(trained) for _ in range(2)])

    def forward(self, x_BSF: Tensor) -> Tensor:
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return x_BSF


def subject(trained: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Model(trained).double().eval(), (torch.randn(2, 3, 8, dtype=torch.float64),)


@pytest.mark.parametrize(
    ("trained", "differs"),
    [("mean of features", True), ("twice", True), ("path", True), ("drops", False), ("", False)],
)
def test_dropout_makes_no_other_function(trained: str, differs: bool) -> None:
    assert differs_in_training(*subject(trained)) == differs


@pytest.mark.parametrize(
    ("trained", "is_cut"),
    [("mean of features", False), ("twice", True), ("path", True), ("drops", True)],
)
def test_layers_stay_whole_that_training_reads_otherwise(trained: str, is_cut: bool) -> None:
    model, batch = subject(trained)
    plan = propose_sharding(model, "auto", 2, example_batch=batch).plan
    assert ("blocks.*.up.weight" in plan) == is_cut


_CUT = {"blocks.*.up.weight": "Shard(0)", "blocks.*.down.weight": "Shard(1)"}


def test_a_plan_that_is_wrong_in_training_alone_is_a_contradiction() -> None:
    model, batch = subject("mean of features")
    with pytest.raises(Contradiction, match="in training, what it returns differs"):
        check_plan(DryRuns(model, batch), shard(_CUT, model, 2))


def test_gradients_of_what_only_training_uses_are_known() -> None:
    model, batch = subject("scale before")
    result = check_plan(DryRuns(model, batch), shard(_CUT, model, 2))
    assert {"blocks.0.scale", "blocks.1.scale"} <= result.whole_grads
