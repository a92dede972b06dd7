"""Experts in lists on several ranks: the loss, gradients and parameters of one device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale
from vescale_dtensor import CommCounter
from vescale_testing import World

from .experts import LENGTH, Trained, adamw, rows_of, tokens
from .listed_experts import HIDDEN, LAYERS, Model, train_layers
from .plans import DP, EP, PARTS, PP, ZERO, Constraints, make_plan
from .test_expert_parallel import compare
from .training import whole


@cache
def on_one_device(layer: str, num_experts: int, parts: int, skewed: bool) -> Trained:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_layers(layer, num_experts, None, parts, skewed)
    finally:
        torch.set_num_threads(threads)


def check(
    world: World, plan: Constraints, layer: str, num_experts: int = 4, *, skewed: bool = False
) -> None:
    parts = plan[DP] * plan.get(PARTS, 1)
    expected = on_one_device(layer, num_experts, parts, skewed)
    # A stage runs its micro-batches inside of a call.
    compare(world.run(train_layers, layer, num_experts, plan, plan[DP], skewed), expected)


@pytest.mark.by_day("Called")
@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_two_ranks_share_a_list_of_experts(world2: World, layer: str) -> None:
    check(world2, {DP: 2, EP: 2}, layer)


@pytest.mark.by_day("OldMixtral")
@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_experts_of_a_list_without_tokens_have_gradients_if_they_are_called(
    world2: World, layer: str
) -> None:
    check(world2, {DP: 2, EP: 2}, layer, 3, skewed=True)


@pytest.mark.by_day("2-4-3")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("size", "num_experts"), [(2, 4), (4, 6)])
def test_four_ranks_share_lists_under_every_stage(
    world4: World, size: int, zero: int, num_experts: int
) -> None:
    check(world4, {DP: 4, EP: size, ZERO: zero}, "OldMixtral", num_experts)


@pytest.mark.slow
def test_recomputed_blocks_with_lists_send_their_tokens_again(world2: World) -> None:
    check(world2, {DP: 2, EP: 2, ZERO: 3, "recompute": "full"}, "Slots")


def saved(path: str, constraints: Constraints) -> dict[str, torch.Tensor]:
    model, optimizer = vescale.parallelize(make_plan(constraints), Model("Slots", 3), adamw)
    batch = rows_of(model, tokens(0))
    model(**batch).backward()
    optimizer.step()
    vescale.save(path, {"model": model, "optimizer": optimizer})
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def loaded(path: str, constraints: Constraints) -> dict[str, torch.Tensor]:
    model, optimizer = vescale.parallelize(make_plan(constraints), Model("Slots", 3), adamw)
    vescale.load(path, {"model": model, "optimizer": optimizer})
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.slow
def test_checkpoints_of_lists_have_the_models_names_and_fit_other_ranks(
    world2: World, world4: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    expected = world2.run(saved, path, {DP: 2, EP: 2, ZERO: 1})[0]
    assert [*expected] == [name for name, _ in Model("Slots", 3).named_parameters()]
    for world, plan in ((world4, {DP: 4, EP: 4, ZERO: 2}), (world2, {DP: 2, ZERO: 3})):
        for made in world.run(loaded, path, plan):
            assert all(torch.equal(made[name], value) for name, value in expected.items())


def all_to_alls() -> tuple[int, int, int]:
    """Return all-to-alls of a forward and of backward, and the bytes of forward's."""
    model: Any = vescale.parallelize(make_plan({DP: 2, EP: 2}), Model("OldMixtral"))
    batch = rows_of(model, tokens(0))
    model(**batch)  # a first call compares inputs, and looks for coupled rows
    with CommCounter() as counter:
        loss = model(**batch)
    forward = counter.by_kind["all_to_all"]
    with CommCounter() as counter:
        loss.backward()
    return forward.num_collectives, counter.by_kind["all_to_all"].num_collectives, forward.nbytes


@pytest.mark.slow
def test_lists_exchange_once_there_and_back_however_many_experts(world2: World) -> None:
    layers, made = 2, world2.run(all_to_alls)
    pairs = 2 * 8 // 2 * LENGTH * layers  # two slots of half of the rows
    of_pair, of_counts = HIDDEN * 8, 4 // 2 * 8  # in float64; a count an expert
    for forward, backward, nbytes in made:
        assert (forward, backward) == (3 * layers, 2 * layers)
        assert nbytes <= 2 * (2 * pairs * of_pair) + layers * of_counts


@pytest.mark.slow
def test_stages_have_lists_of_experts(world4: World) -> None:
    check(world4, {DP: 2, EP: 2, PP: 2, PARTS: 2}, "Dense", 3)
