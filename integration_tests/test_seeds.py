"""Ranks that did not seed alike train rank 0's model, and one of them says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale
from vescale_dtensor import DTensor
from vescale_testing import World

from .models import HandWritten
from .plans import DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .test_bad_input import check

PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
}


class Drawn(HandWritten):
    """Random numbers in a buffer, in an attribute, and of every way to make parameters."""

    pattern: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pattern", torch.rand(5, 24))
        self.kept = [torch.randn(3), torch.randperm(4)]
        # Of few elements, so that the generator is left with half of a pair of normals.
        self.scale = nn.Parameter(torch.randn(3))
        nn.init.trunc_normal_(self.head.weight, std=0.3)
        nn.init.orthogonal_(self.norm.weight.data.unsqueeze(0))


def eager(build: Callable[[], nn.Module]) -> nn.Module:
    return build()


def deferred(build: Callable[[], nn.Module]) -> nn.Module:
    return vescale.deferred_init(build)


WAYS = {"eager": eager, "deferred": deferred}


def values(model: nn.Module) -> list[Tensor]:
    named = [*model.parameters(), *model.buffers(), *getattr(model, "kept", [])]
    tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in named]
    return [tensor.detach().clone() for tensor in tensors]


def train_unseeded(way: str, constraints: Constraints) -> tuple[list[str], list[bool], bool]:
    """Return warnings, which values are those of rank 0's seed, and whether generators agree."""
    torch.manual_seed(17)
    expected = values(Drawn())
    after = torch.get_rng_state()
    torch.manual_seed(17 + dist.get_rank())
    if dist.get_rank() == 1:
        torch.randn(())  # half of a pair is left
        torch.rand(700)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = vescale.parallelize(make_plan(constraints), WAYS[way](Drawn))
    same = [torch.equal(*pair) for pair in zip(values(model), expected, strict=True)]
    return [str(each.message) for each in caught], same, torch.equal(torch.get_rng_state(), after)


@pytest.mark.by_day(
    "dp-eager",
    "dp-deferred",
    "zero3-eager",
    "zero3-deferred",
    "tp-deferred",
    "pp-eager",
    "pp-deferred",
)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_that_drew_differently_train_the_model_of_rank_0(
    world2: World, plan: str, way: str
) -> None:
    first, second = world2.run(train_unseeded, way, PLANS[plan])
    for _, same, generators_agree in (first, second):
        assert same == [True] * len(same)
        assert generators_agree
    assert len(first[0]) == 1, first[0]
    assert "ranks came with different values of 'positions' and" in first[0][0]
    assert "torch.manual_seed(0) on every rank" in first[0][0]
    assert second[0] == []


def same_weights() -> list[str]:
    torch.manual_seed(dist.get_rank())
    model = HandWritten()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vescale.parallelize(make_plan({DP: 2}), model)
    return [str(each.message) for each in caught]


def test_ranks_whose_generators_alone_differ_go_on_from_that_of_rank_0(world2: World) -> None:
    first, second = world2.run(same_weights)
    assert len(first) == 1
    assert "different states of the random number generator" in first[0]
    assert second == []


def seeded() -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vescale.parallelize(make_plan({DP: 2}), vescale.deferred_init(HandWritten))
    return [str(each.message) for each in caught]


def test_ranks_that_seeded_alike_say_nothing(world2: World) -> None:
    assert world2.run(seeded) == [[], []]


def of_other_structure(kind: str) -> None:
    odd = dist.get_rank() == 1
    torch.manual_seed(dist.get_rank())
    model: nn.Module = HandWritten()
    if odd:
        head = nn.Linear(24, 37, bias=kind != "missing", dtype=torch.float32)
        models: dict[str, Callable[[], object]] = {
            "shape": lambda: setattr(model, "head", nn.Linear(24, 39)),
            "dtype": lambda: model.get_submodule("head").to(torch.bfloat16),
            "missing": lambda: setattr(model, "head", head),
            "frozen": lambda: model.get_submodule("head").requires_grad_(False),
            "buffer": lambda: model.register_buffer("extra", torch.zeros(3)),
        }
        models[kind]()
    vescale.parallelize(make_plan({DP: 2}), model)


STRUCTURES = {
    "shape": r"parameter 'head.weight' is \(37, 24\) float32 on rank 0 and \(39, 24\) float32 on "
    r"rank 1 \(1 more differ\)",
    "dtype": r"'head.weight' is \(37, 24\) float32 on rank 0 and \(37, 24\) bfloat16 on rank 1",
    "missing": r"parameter 'head.bias' is \(37,\) float32 on rank 0 and missing on rank 1",
    "frozen": r"'head.weight' is \(37, 24\) float32 on rank 0 and .*frozen on rank 1",
    "buffer": r"buffer 'extra' is missing on rank 0 and \(3,\) float32 on rank 1",
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_models_of_different_structure_are_refused_with_the_difference(
    world2: World, kind: str
) -> None:
    check(world2, ValueError, STRUCTURES[kind], of_other_structure, kind)
