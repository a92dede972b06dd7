"""What lies outside of blocks is compared with one device, too, or stays whole with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from vescale_parallel import ShardingProposal, propose_sharding

from . import odd_models as odd
from .one_device import check_against_one_device, proposed

X = torch.linspace(-1, 1, 2 * 6 * 12, dtype=torch.float64).sin().view(2, 6, 12)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 10 * 10, dtype=torch.float64).cos().view(2, 3, 10, 10)
IDS = torch.arange(24).view(2, 12) % odd.ROWS
BLOCKS = "blocks.*.up.weight"
NOTHING = ""

# What each model has cut at least.
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, str]] = {
    "convolution stem": (odd.ConvolutionStem, X, "second.bias.<read>"),
    "functional head": (odd.FunctionalHead, X, BLOCKS),
    "scaled head": (odd.ScaledHead, X, "up.weight"),
    "weights read outside": (odd.ReadOutside, X, "blocks.1.up.weight"),
    "blocks called twice": (odd.CalledTwice, X, BLOCKS),
    "called by methods": (odd.CalledByMethods, X, NOTHING),
    "borrowed layers": (odd.Borrowing, X, BLOCKS),
    "plain lists": (odd.PlainLists, X, "first.up.weight"),
    "parameter lists": (odd.ParameterLists, X, NOTHING),
    "parameter dicts": (odd.ParameterDicts, X, "weights.up"),
    "layer scales": (odd.LayerScales, X, "inner.*"),
    "modulated": (odd.Modulated, X, "condition.weight"),
    "parametrized": (odd.Parametrized, X, NOTHING),
    "normed by hooks": (odd.NormedByHooks, X, NOTHING),
    "two tasks": (odd.Heads, X, "tasks.second.0.weight"),
    "one task": (odd.OneTask, X, "tasks.first.0.weight"),
    "branching": (odd.Branching, X, NOTHING),
    "recomputed": (odd.Recomputed, X, BLOCKS),
    "cosine": (odd.Cosine, X, BLOCKS),
    "statistics": (odd.Statistics, X, "head.weight"),
    "buffered": (odd.Buffered, X, BLOCKS),
    "squeeze and excite": (partial(odd.SqueezeExcite, linear=True), IMAGES, "squeeze.weight"),
    "by convolutions": (partial(odd.SqueezeExcite, linear=False), IMAGES, NOTHING),
    "positions": (odd.Positions, IDS, "embed.weight"),
    "tied modules": (odd.TiedModules, IDS, "head.weight"),
    "tied by function": (odd.TiedByFunction, IDS, "stack.blocks.*.up.weight"),
    "tied by closure": (odd.TiedByClosure, IDS, "layers.*.2.up.weight"),
    "three heads": (odd.WithThreeHeads, X, BLOCKS),
}


def found(name: str, size: int) -> ShardingProposal:
    make, given, _ = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.nn.utils.weight_norm
        return proposed(make, (given,), size)


@pytest.mark.by_day(
    "convolution stem-3",
    "scaled head-2",
    "weights read outside-2",
    "blocks called twice-3",
    "called by methods-2",
    "borrowed layers-3",
    "plain lists-2",
    "parameter lists-2",
    "parameter lists-3",
    "parameter dicts-2",
    "parameter dicts-3",
    "layer scales-2",
    "normed by hooks-2",
    "normed by hooks-3",
    "two tasks-2",
    "one task-2",
    "recomputed-2",
    "buffered-2",
    "squeeze and excite-2",
    "tied modules-3",
    "tied by function-3",
)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_wrong(name: str, size: int) -> None:
    plan = found(name, size).plan
    at_least = MODELS[name][2]
    assert not at_least or at_least in plan


REASONS: dict[str, tuple[int, str, str]] = {
    "tied by closure": (2, "embed.emb.weight dim 0", "used by a function"),
    "three heads": (2, "attention.*.qkv.weight dim 0 length 3", "not divisible by 2"),
    "one task": (2, "tasks.second.*.weight dim 0", "no later layer reduces over"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_stays_whole_is_named_with_the_reason(name: str) -> None:
    size, start, why = REASONS[name]
    reasons = [w for n, w in found(name, size).left_whole.items() if n.startswith(start)]
    assert reasons
    assert why in reasons[0]


def test_a_whole_parameter_that_meets_cut_features_has_its_gradient_summed() -> None:
    assert found("scaled head", 2).plan["scale.<grad>"] == "Partial()"


def test_outside_of_blocks_activations_are_whole_if_the_sequence_is_cut() -> None:
    model = odd.ScaledHead().double()
    found = propose_sharding(model, "auto", 2, sequence=True, example_batch=(X,))
    assert found.plan["blocks.*.down.<leave>"] == "Shard(1)"
    assert found.plan["up.weight"] == "Shard(0)"
    check_against_one_device(model, (X,), found.plan, 2)
