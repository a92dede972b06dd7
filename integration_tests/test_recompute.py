"""Blocks that run again in backward give the numbers of blocks that keep their activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vescale
from vescale_testing import World

from .families import make
from .plans import DP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .training import whole

# With a cache of keys and values in forward, and without one.
FAMILIES = ("llama", "gemma2", "t5", "gpt2", "bart", "bert")


def trained(
    family: str, constraints: Constraints, given: dict[str, Any]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return loss and gradients, with activations kept and with blocks run again."""
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for how in ("none", "full"):
        torch.manual_seed(0)
        model, call = make(family)
        model = vescale.parallelize(make_plan({**constraints, "recompute": how}), model.train())
        parts = constraints.get(DP, 1)
        part = torch.distributed.get_rank() // constraints.get(TP, 1)
        loss = model(**{n: x.chunk(parts)[part] for n, x in call.items()}, **given).loss
        loss.backward()
        grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads))
    return found


def check(world: World, family: str, constraints: Constraints, **given: Any) -> None:
    model, call = make(family)
    torch.manual_seed(0)
    expected = model.train()(**call).loss.item()
    for (loss, grads), (again, grads_again) in world.run(trained, family, constraints, given):
        # Norms and losses compute in float32 whatever the model's dtype.
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert torch.equal(loss, again)
        assert grads.keys() == grads_again.keys()
        for name, grad in grads.items():
            # The same sums over memory that is aligned otherwise; observed: 8e-16.
            atol = 1e-13 * float(grad.abs().max())
            torch.testing.assert_close(grads_again[name], grad, rtol=0, atol=atol, msg=name)


@pytest.mark.by_day("llama", "bert")
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_are_recomputed_as_they_are(world2: World, family: str) -> None:
    check(world2, family, {DP: 2, ZERO: 3})


@pytest.mark.by_day("llama")
@pytest.mark.parametrize("family", ["llama", *FAMILIES[1:]])
def test_cut_sequences_are_recomputed_as_they_are(world2: World, family: str) -> None:
    check(world2, family, {TP: 2, SEQUENCE: True})


@pytest.mark.by_day("llama")
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_cache_that_was_asked_for_is_as_it_was_before_the_first_run(
    world2: World, family: str
) -> None:
    check(world2, family, {TP: 2}, use_cache=True)


def trained_on(lengths: tuple[int, ...], how: str) -> dict[str, Tensor]:
    """Return gradients of the sum of losses of several calls, with one backward pass behind."""
    torch.manual_seed(0)
    model, call = make("llama")
    plan = make_plan({TP: 2, SEQUENCE: True, "recompute": how})
    model = vescale.parallelize(plan, model.train())
    losses = [model(**{n: x[:, :length] for n, x in call.items()}).loss for length in lengths]
    torch.stack(losses).sum().backward()
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def test_calls_of_several_lengths_run_again_behind_each_other(world2: World) -> None:
    lengths = 12, 9, 11, 10  # of 11 and 12 the first rank has as much
    kept, again = (world2.run(trained_on, lengths, how) for how in ("none", "full"))
    for expected, found in zip(kept, again, strict=True):
        assert expected.keys() == found.keys()
        for name, grad in expected.items():
            assert torch.equal(found[name], grad), name
