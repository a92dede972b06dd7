"""What the planner returns for any number of ranks is accepted as it is, and is one device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from vescale_dtensor import DTensor
from vescale_parallel import ParallelPlan, parallelize
from vescale_planner import Cluster, generate_plan
from vescale_testing import RankError, World

from .experts import ROWS, AllInDouble, build, rows_of, tokens
from .fake_ranks import rank_0_of
from .families import CONFIGS, ROWS as ROWS_OF_FAMILIES, InDouble, hugging_face, make
from .plans import CP, DP, EP, PP, SEQUENCE, TP, ZERO

CPU = Cluster.preset("cpu")
NIGHTLY = [pytest.mark.nightly]
FAMILIES = (
    "nanogpt", "branching", "encoding", "llama", "two_key_value_heads", "mixtral", "qwen3",
    "gemma2", "gpt2", "bert", "t5", "vit",
)  # fmt: skip
FEW = [("llama", 8), ("two_key_value_heads", 3), ("vit", 6)]
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


@pytest.mark.by_day("two_key_value_heads-3")
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
        if family == "branching" and plan.data_parallel.size * plan.num_microbatches > 1:
            # It branches on a token of the first row, which other parts of the batch do not have.
            with pytest.raises(RankError, match="they depend on each other in 'the model'"):
                world2.run(on_rank, family, plan.to_json())
            continue
        for found, grads in world2.run(on_rank, family, plan.to_json()):
            torch.testing.assert_close(found, loss, rtol=tolerance, atol=tolerance)
            for name, expected in gradients.items():
                torch.testing.assert_close(
                    grads[name], expected, rtol=tolerance, atol=tolerance, msg=name
                )


# Of six blocks; of two, one that runs again needs what two have kept.
DEPTHS = {
    "llama": "num_hidden_layers", "gpt2": "n_layer", "t5": "num_layers",
    "bert": "num_hidden_layers", "vit": "num_hidden_layers", "qwen3": "num_hidden_layers",
}  # fmt: skip


def deep(family: str) -> tuple[Any, dict[str, Any]]:
    _, batch = make(family)
    sizes = {**CONFIGS[family], DEPTHS[family]: 6}
    return hugging_face(family, "sdpa", **sizes).double(), batch


def with_some_blocks(family: str, axis: str) -> ParallelPlan:
    """Return a plan for machines that are too small unless some blocks run again."""
    found: dict[str, int] = {}
    model, batch = deep(family)
    held: dict[str, Any] = {TP: 1, axis: 2, "batch.gradient_accumulation": 1, ZERO: 0}
    held |= {"batch.global_size": 2 * ROWS_OF_FAMILIES, "pipeline_parallel.microbatches": 1}
    for mode in ("none", "full"):
        given = {**held, "recompute": mode}
        plan = generate_plan(model, given, world_size=2, cluster=CPU, example_batch=batch)
        assert plan.estimate is not None
        found[mode] = plan.estimate.memory_bytes
    between = replace(CPU, memory_bytes=(found["none"] + found["full"]) // 2)
    return generate_plan(model, held, world_size=2, cluster=between, example_batch=batch)


def deep_on_rank(family: str, plan: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = deep(family)
    return loss_and_gradients(parallelize(ParallelPlan.from_json(plan), model), batch)


@pytest.mark.by_day("llama-pipeline_parallel.size")
@pytest.mark.parametrize(
    ("family", "axis"),
    [
        pytest.param(*each, marks=[] if each in {("llama", PP), ("t5", DP)} else NIGHTLY)
        for each in ((family, axis) for family in DEPTHS for axis in (DP, PP))
    ],
)
def test_plans_that_run_some_blocks_again_are_one_device(
    family: str, axis: str, world2: World
) -> None:
    plan = with_some_blocks(family, axis)
    assert isinstance(plan.recompute, Mapping)
    assert 0 < len(plan.recompute) < 6 * (1 + (family == "t5"))
    torch.manual_seed(0)
    model, batch = deep(family)
    loss, gradients = loss_and_gradients(model, batch)
    for found, grads in world2.run(deep_on_rank, family, plan.to_json()):
        # Float64; a pipeline's last stage sums in another order.
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
        assert_equal_gradients(grads, gradients)


def assert_equal_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare by the largest element of each; sums are in another order."""
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-3
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12 * scale, msg=name)


# Of four ranks, with sequences that ranks share.
SLICED: dict[str, dict[str, Any]] = {
    "alone": {CP: 4},
    "data": {CP: 2, DP: 2},
    "zero 3": {CP: 2, DP: 2, ZERO: 3},
    "tensor": {CP: 2, TP: 2},
    "sequence": {CP: 2, TP: 2, SEQUENCE: True},
    "pipeline": {CP: 2, PP: 2},
    "ring": {CP: 2, "context_parallel.method": "ring"},
}


def check_sliced(world: World, family: str, wish: str) -> None:
    with InDouble():
        model, batch = make(family)
        loss, gradients = loss_and_gradients(model, batch)
    plan = generate_plan(
        make(family)[0], SLICED[wish], world_size=4, cluster=CPU, example_batch=batch
    )
    assert plan.context_parallel.size == SLICED[wish][CP]
    for found, grads in world.run(on_rank, family, plan.to_json()):
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
        assert_equal_gradients(grads, gradients)


@pytest.mark.slow
def test_plans_with_shared_sequences_are_one_device(world4: World) -> None:
    check_sliced(world4, "llama", "data")


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "t5"])
@pytest.mark.parametrize("wish", SLICED)
def test_plans_of_families_with_shared_sequences_are_one_device(
    world4: World, family: str, wish: str
) -> None:
    check_sliced(world4, family, wish)


def with_a_sharded_sequence(family: str, context: int = 1) -> ParallelPlan:
    """Return the plan for two tensor-parallel ranks with too little memory for another."""
    given = {TP: 2, CP: context, "recompute": "none", "batch.gradient_accumulation": 1}
    num_ranks = 2 * context
    cluster = replace(CPU, reserved_bytes=0)
    model, batch = make(family)
    asked = {**given, SEQUENCE: False}
    whole = generate_plan(model, asked, world_size=num_ranks, cluster=cluster, example_batch=batch)
    assert whole.estimate is not None
    small = replace(cluster, memory_bytes=whole.estimate.memory_bytes - 1)
    return generate_plan(model, given, world_size=num_ranks, cluster=small, example_batch=batch)


def check_sequence(world: World, family: str, context: int = 1) -> None:
    plan = with_a_sharded_sequence(family, context)
    assert plan.tensor_parallel.sequence
    assert any("no plan fits without" in each for each in plan.reasons)
    with InDouble():
        loss, gradients = loss_and_gradients(*make(family))
    for found, grads in world.run(on_rank, family, plan.to_json()):
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
        assert_equal_gradients(grads, gradients)


@pytest.mark.slow
def test_a_sequence_is_sharded_where_that_fits_alone(world2: World) -> None:
    check_sequence(world2, "llama")


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["nanogpt", "qwen3", "gemma2", "gpt2", "two_key_value_heads"])
def test_a_sequence_of_families_is_sharded_where_that_fits_alone(
    world2: World, family: str
) -> None:
    check_sequence(world2, family)


@pytest.mark.by_day("llama")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_slice_is_sharded_where_that_fits_alone(world4: World, family: str) -> None:
    check_sequence(world4, family, 2)


MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3")
# Of four ranks, unasked and asked for; each gets experts that ranks share.
SHARED: dict[str, dict[str, Any]] = {
    "unasked": {PP: 1, TP: 1, ZERO: 0, "recompute": "none", "batch.gradient_accumulation": 1},
    "asked for": {EP: 2},
    "zero 3": {EP: 2, ZERO: 3, DP: 4},
    "tensor": {EP: 2, TP: 2},
    "sequence": {EP: 2, TP: 2, SEQUENCE: True},
    "pipeline": {EP: 2, PP: 2},
}


def with_experts(family: str, wish: dict[str, Any]) -> ParallelPlan:
    """Return the plan for four ranks; unasked, of devices that have too little memory without."""
    given = {"batch.global_size": ROWS, **wish}
    cluster = replace(CPU, reserved_bytes=0)

    def plan(constraints: dict[str, Any], cluster: Cluster) -> ParallelPlan:
        return generate_plan(
            build(family, "batched_mm"),
            constraints,
            world_size=4,
            cluster=cluster,
            example_batch=tokens(0),
        )

    if EP not in wish:
        whole = plan({**given, EP: 1}, cluster).estimate
        assert whole is not None
        cluster = replace(cluster, memory_bytes=whole.memory_bytes - 1)
    return plan(given, cluster)


def mixture_on_rank(family: str, plan: str) -> tuple[Any, dict[str, Any]]:
    with AllInDouble():
        model = parallelize(ParallelPlan.from_json(plan), build(family, "batched_mm"))
        return loss_and_gradients(model, rows_of(model, tokens(0)))


def check_mixture(world: World, family: str, wish: str) -> None:
    plan = with_experts(family, SHARED[wish])
    assert plan.expert_parallel.size > 1
    with AllInDouble():
        loss, gradients = loss_and_gradients(build(family, "batched_mm"), tokens(0))
    ranks = world.run(mixture_on_rank, family, plan.to_json())
    # Sums in another order, of float64. A rank has the loss of its rows, of equally many targets.
    mean = sum(found for found, _ in ranks) / len(ranks)
    torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0)
    for _, grads in ranks:
        assert_equal_gradients(grads, gradients)


@pytest.mark.slow
def test_plans_with_shared_experts_are_one_device(world4: World) -> None:
    check_mixture(world4, "mixtral", "unasked")


@pytest.mark.nightly
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("wish", SHARED)
def test_plans_of_mixtures_are_one_device(world4: World, family: str, wish: str) -> None:
    check_mixture(world4, family, wish)
