"""Under context parallelism the head and the loss run on slices, and are those of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import vescale
from vescale_testing import World

from .context_heads import GATHERED, ON_SLICES, build_habit, train_habit
from .contexts import VOCABULARY, batch_of, build
from .experts import Trained
from .families import InDouble
from .plans import CP, TP, ZERO, Constraints, make_plan
from .test_expert_parallel import compare

FEATURES = 32  # of weights, whose size is another
METHOD, OUTPUTS = "context_parallel.method", "context_parallel.outputs"


@cache
def on_one_device(habit: str) -> Trained:
    return train_habit(habit, None)


@pytest.mark.slow
@pytest.mark.parametrize("habit", [*ON_SLICES, *GATHERED])
def test_losses_of_any_habit_are_those_of_one_device(world2: World, habit: str) -> None:
    method = "ring" if habit in ("tied", "z_loss", "chunks") else "all_to_all"
    compare(world2.run(train_habit, habit, {CP: 2, METHOD: method}), on_one_device(habit))


def on_rank_positions(habit: str) -> list[int]:
    """Return of how many positions the largest tensor over the vocabulary is, in every rank."""
    model: Any = vescale.parallelize(make_plan({CP: 2}), build_habit(habit))
    batch, seen = batch_of(0, 12, ""), _Largest()
    with InDouble():
        model(**batch)  # which is compared with one device
        with seen:
            output = model(**batch)
            loss = output["loss"] if isinstance(output, dict) else output[0]
            loss.backward()
    return [seen.numel // VOCABULARY // len(batch["labels"])]


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(made):
            if isinstance(x, Tensor) and VOCABULARY in x.shape and FEATURES not in x.shape:
                self.numel = max(self.numel, x.numel())
        return made


@pytest.mark.slow
def test_logits_are_slices(world2: World) -> None:
    for habit in ON_SLICES[:-1]:  # soft targets are themselves as large
        found = world2.run(on_rank_positions, habit)
        assert found == [[6], [6]], habit
