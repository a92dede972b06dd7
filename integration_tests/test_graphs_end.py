"""No graph of a step outlives it, as on one device: it would keep the activations of a block."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vescale
from vescale_testing import World

from .families import make
from .plans import CP, DP, EP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan

PLANS: dict[str, Constraints] = {
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "cp": {CP: 2},
    "pp": {PP: 2, PARTS: 2},
    "accumulation": {DP: 2, "batch.gradient_accumulation": 2},
}


def left(family: str, constraints: Constraints, how: str, steps: int) -> list[str]:
    """Return the nodes of graphs that are alive behind some steps, and were not before."""
    before = [weakref.ref(each) for each in graphs()]  # of earlier tests in this process
    torch.manual_seed(0)
    model, call = make(family)
    if how == "own":
        # Renamed in transformers 5, where the old name warns.
        old, new = "gradient_checkpointing_enable", "activation_checkpointing_enable"
        getattr(model, new if hasattr(model, new) else old)({"use_reentrant": False})
    plan = make_plan({**constraints, "recompute": "full" if how == "full" else "none"})
    model = vescale.parallelize(plan, model.train())
    parts = plan.data_parallel.size
    part = dist.get_rank() // plan.tensor_parallel.size % parts
    batch = {n: x.chunk(parts)[part] for n, x in call.items()}
    for _ in range(steps):
        model(**batch).loss.backward()
    known = [each() for each in before]
    return [type(x.grad_fn).__name__ for x in graphs() if not any(x is each for each in known)]


def graphs() -> list[Tensor]:
    """Return the tensors of this process that have a graph."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lazy modules that are asked for their class
        alive = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return [each for each in alive if each.grad_fn is not None]


HOW = ("none", "full", "own")
ALWAYS = [*(("tp", how) for how in HOW), ("tp-sequence", "own"), ("zero3", "full"), ("pp", "own")]
OTHERS = [(plan, how) for plan in PLANS for how in HOW if (plan, how) not in ALWAYS]


@pytest.mark.by_day("zero3-full", "tp-sequence-none")
@pytest.mark.parametrize(
    ("plan", "how"),
    [*ALWAYS, *OTHERS],
)
def test_no_graph_outlives_a_step(world2: World, plan: str, how: str) -> None:
    found = world2.run(left, "llama", PLANS[plan], how, 2)
    assert found == [[], []]


def test_no_graph_outlives_a_step_of_experts(world2: World) -> None:
    assert world2.run(left, "mixtral", {DP: 2, EP: 2}, "full", 2) == [[], []]
