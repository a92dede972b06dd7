"""What the planner returns for any number of ranks is accepted as it is, and is one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from vescale_parallel import ParallelPlan, parallelize
from vescale_planner import Cluster, generate_plan
from vescale_testing import World

from .fake_ranks import rank_0_of
from .families import InDouble, make

CPU = Cluster.preset("cpu")
FAMILIES = (
    "nanogpt", "branching", "encoding", "llama", "two_key_value_heads", "mixtral", "qwen3",
    "gemma2", "gpt2", "bert", "t5", "vit",
)  # fmt: skip
FEW = [("llama", 8), ("nanogpt", 6), ("two_key_value_heads", 3), ("vit", 4)]
OTHERS = [(f, w) for f in FAMILIES for w in range(1, 9) if (f, w) not in FEW]
# Nothing, and each kind of parallelism where it can be.
WISHES: list[dict[str, Any]] = [
    {},
    {"data_parallel.size": 1},
    {"data_parallel.size": 1, "tensor_parallel.size": 1},
]


def emitted(family: str, world_size: int) -> dict[str, ParallelPlan]:
    """Return the different plans that the planner returns for a family, by their text."""
    found: dict[str, ParallelPlan] = {}
    for wish in WISHES if world_size > 1 else WISHES[:1]:
        model, batch = make(family)
        try:
            plan = generate_plan(
                model, wish, world_size=world_size, cluster=CPU, example_batch=batch
            )
        except ValueError as error:
            # A wish may be impossible; without one there is always data parallelism.
            if not wish or "no plan obeys" not in str(error):
                raise
            continue
        found.setdefault(str(plan.dotted()), plan)
    return found


def precision(family: str) -> AbstractContextManager[Any]:
    """Mixtral's grouped product has no float64."""
    return nullcontext() if family == "mixtral" else InDouble()


def assert_accepted(family: str, world_size: int) -> None:
    for plan in emitted(family, world_size).values():
        pipeline = plan.pipeline_parallel
        assert pipeline.size == 1 or pipeline.microbatches >= pipeline.size
        model, _ = make(family)
        with rank_0_of(world_size), precision(family):
            assert parallelize(ParallelPlan.from_json(plan.to_json()), model) is model


@pytest.mark.parametrize(("family", "world_size"), FEW)
def test_plans_are_accepted_as_they_are(family: str, world_size: int) -> None:
    assert_accepted(family, world_size)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "world_size"), OTHERS)
def test_plans_of_all_families_are_accepted(family: str, world_size: int) -> None:
    assert_accepted(family, world_size)


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    found = model(**batch)
    loss = found if isinstance(found, torch.Tensor) else found.loss
    loss.backward()
    gradients = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
    }
    return loss.detach(), gradients


def on_rank(family: str, plan: str) -> tuple[Any, dict[str, Any]]:
    with precision(family):
        model, batch = make(family)
        return loss_and_gradients(parallelize(ParallelPlan.from_json(plan), model), batch)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_for_two_ranks_are_one_device(family: str, world2: World) -> None:
    with precision(family):
        loss, gradients = loss_and_gradients(*make(family))
    # Sums in another order, of float64; of float32 where the model has no other.
    tolerance = 1e-12 if loss.dtype == torch.float64 else 1e-5
    for plan in emitted(family, 2).values():
        for found, grads in world2.run(on_rank, family, plan.to_json()):
            torch.testing.assert_close(found, loss, rtol=tolerance, atol=tolerance)
            for name, expected in gradients.items():
                torch.testing.assert_close(
                    grads[name], expected, rtol=tolerance, atol=tolerance, msg=name
                )
