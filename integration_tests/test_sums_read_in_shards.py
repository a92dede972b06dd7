"""Sums over tensor-parallel ranks that layers sharded beside them read: Mamba's step sizes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import propose_sharding
from vescale_testing import World

from .families import hugging_face, tokens
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .sharded_layers import SIZES, LanguageModel, compare

BACKEND = "compile_backend"


class Gated(nn.Module):
    """Features that a gate of few numbers scales, all of which are made of all features."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up, self.squeeze = nn.Linear(32, 64), nn.Linear(64, 8, bias=bias)
        self.excite = nn.Parameter(0.1 * torch.randn(8, 64))
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        features = F.gelu(self.up(x))
        return x + self.down(
            features * torch.sigmoid(F.gelu(self.squeeze(features)) @ self.excite)
        )


class Seen(Gated):
    """One that adds what it squeezed to its output, which every rank computes whole."""

    def forward(self, x: Tensor) -> Tensor:
        features = F.gelu(self.up(x))
        squeezed = self.squeeze(features)
        out = self.down(features * torch.sigmoid(squeezed @ self.excite))
        return x + out + squeezed.mean(-1, keepdim=True)


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "mamba":
        sizes = {**SIZES, "state_size": 4, "time_step_rank": 4}
        return hugging_face("mamba", "eager", **sizes).double()
    block = Seen if name == "seen" else Gated
    return LanguageModel(partial(block, bias=name == "biased")).double()


SQUEEZE = {
    "mamba": "backbone.layers.*.mixer.x_proj",
    "gated": "blocks.*.squeeze",
    "biased": "blocks.*.squeeze",
}


def batch() -> dict[str, Tensor]:
    return tokens() | {"labels": tokens()["input_ids"]}


@pytest.mark.by_day("False-gated", "False-biased", "True-mamba", "True-gated", "True-biased")
@pytest.mark.slow
@pytest.mark.parametrize("name", SQUEEZE)
@pytest.mark.parametrize("sequence", [False, True])
def test_their_layers_are_sharded(name: str, sequence: bool) -> None:
    model = build(name)
    plan = propose_sharding(model, "auto", 2, sequence=sequence, example_batch=batch()).plan
    assert plan[f"{SQUEEZE[name]}.weight"] == "Shard(1)"
    assert plan[f"{SQUEEZE[name]}.<reenter>"] == "Replicate()"
    blocks = {n.replace(".0.", ".*.") for n, p in model.named_parameters() if p.dim() > 1}
    assert {each for each in blocks if ".*." in each} <= plan.keys()


@pytest.mark.slow
def test_they_stay_whole_where_all_ranks_use_the_sum_alike() -> None:
    found = propose_sharding(build("seen"), "auto", 2, example_batch=batch())
    assert "blocks.*.squeeze.weight" not in found.plan
    assert "which every rank computes whole" in str(found.left_whole)


@pytest.mark.by_day("gated", "biased")
@pytest.mark.slow
@pytest.mark.parametrize("name", SQUEEZE)
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World, name: str) -> None:
    compare(world2, build, name, {TP: 2})


@pytest.mark.by_day("*'recompute': 'full'*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("mamba", {TP: 4, SEQUENCE: True}),
        ("gated", {TP: 2, DP: 2, ZERO: 3, SEQUENCE: True}),
        ("biased", {TP: 2, PP: 2, PARTS: 2}),
        ("gated", {TP: 2, DP: 2, ZERO: 3, "recompute": "full"}),
        ("mamba", {TP: 2, DP: 2, ZERO: 2}),
        ("biased", {TP: 2, DP: 2, ZERO: 1, "compile": "blocks", BACKEND: "aot_eager"}),
        ("mamba", {TP: 2, PP: 2, PARTS: 2}),
        ("mamba", {TP: 4}),
    ],
    ids=str,
)
def test_four_ranks_have_the_losses_and_gradients_of_one(
    world4: World, name: str, constraints: Constraints
) -> None:
    compare(world4, build, name, constraints)


def generated(constraints: Constraints | None) -> Tensor:
    model: Any = build("mamba").eval()
    if constraints is not None:
        plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=tokens())
        model = vescale.parallelize(plan, model)
        # Calls with what calls before them kept cannot be compared: ranks have parts of it.
        warnings.filterwarnings("ignore", "the sharding plan was not compared")
    return model.generate(tokens()["input_ids"], max_new_tokens=6, do_sample=False)


@pytest.mark.nightly
@pytest.mark.slow
def test_models_with_them_generate(world2: World) -> None:
    expected = generated(None)
    assert all(torch.equal(each, expected) for each in world2.run(generated, {TP: 2}))
