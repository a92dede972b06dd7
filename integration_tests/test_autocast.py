"""A loop that computes under ``torch.autocast``, with and without a gradient scaler."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import vescale
from vescale_dtensor import DTensor, GatherWarning
from vescale_testing import World

from .experts import rows_of, tokens
from .listed_experts import Model
from .models import batches, build
from .plans import DP, EP, PP, TP, ZERO, Constraints, make_plan
from .training import whole

SCALE = 2.0**8
# Ranks that have copies of the model, or micro-batches of a pipeline, compute with bits of one
# device that adds up gradients of two micro-batches.
AS_MICROBATCHES: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero1": {DP: 2, ZERO: 1},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "pp": {PP: 2, "pipeline_parallel.microbatches": 2},
}


def optimizer_of(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def run(
    model: nn.Module,
    optimizer: Optimizer,
    dtype: torch.dtype,
    *,
    parts: int = 1,
    replica: slice = slice(None),
    scale: float = SCALE,
) -> dict[str, Tensor]:
    """Train in so many micro-batches; return whole parameters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=dtype == torch.float16)
    for step, batch in enumerate(batches(4)):
        for index in range(parts):
            rows = {name: value.chunk(parts)[index][replica] for name, value in batch.items()}
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = model(rows)
            scaler.scale(loss / parts).backward()
        if step == 0:  # a pipeline does not know the scale yet, so float16 rounds more
            optimizer.zero_grad()
            continue
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = {name: value.detach() for name, value in model.named_parameters()}
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in found.items()}


def of_one_device(
    name: str, dtype: torch.dtype, parts: int = 1, scale: float = SCALE
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build(name)
    return run(model, optimizer_of(model), dtype, parts=parts, scale=scale)


def of_a_plan(name: str, dtype: torch.dtype, constraints: Constraints) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(make_plan(constraints), build(name), optimizer_of)
    replicas = constraints.get(DP, 1)
    rank, rows = dist.get_rank() % replicas, 8 // replicas
    with warnings.catch_warnings():
        warnings.simplefilter("error", GatherWarning)
        part = slice(rank * rows, (rank + 1) * rows)
        return run(model, optimizer, dtype, replica=part)


@pytest.mark.by_day("hand_written-zero3-torch.float16")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", AS_MICROBATCHES)
@pytest.mark.parametrize("name", ["hand_written", "llama"])
def test_bits_are_those_of_one_device_and_its_micro_batches(
    world1: World, world2: World, name: str, plan: str, dtype: torch.dtype
) -> None:
    constraints = AS_MICROBATCHES[plan]
    # A replica's loss is not divided, and float16 rounds what is small: as large for one device.
    scale = SCALE * constraints.get(DP, 1)
    # On a rank, which has one thread: several add up in another order.
    (expected,) = world1.run(of_one_device, name, dtype, 2, scale)
    for found in world2.run(of_a_plan, name, dtype, constraints):
        for fqn, value in expected.items():
            assert torch.equal(found[fqn], value), fqn


@pytest.mark.by_day("hand_written-torch.float16")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["hand_written", "llama"])
def test_a_tensor_parallel_loop_is_as_near_to_float32(
    world1: World, world2: World, name: str, dtype: torch.dtype
) -> None:
    (exact,) = world1.run(of_one_device, name, torch.float32)
    (rounded,) = world1.run(of_one_device, name, dtype)
    error = distance(rounded, exact)
    for found in world2.run(of_a_plan, name, dtype, {TP: 2}):
        assert distance(found, exact) <= 2 * error


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    apart = [(found[fqn] - value).flatten() for fqn, value in expected.items()]
    return float(torch.cat(apart).norm())


def with_listed_experts(
    constraints: Constraints | None, dtype: torch.dtype, skewed: bool
) -> dict[str, Tensor]:
    """Train a model whose experts make rows of another dtype than theirs under autocast."""
    model: nn.Module = Model("OldMixtral", skewed=skewed).float()
    optimizer, parts = optimizer_of(model), 2
    if constraints is not None:
        model, optimizer = vescale.parallelize(make_plan(constraints), model, optimizer_of)
        parts //= constraints.get(DP, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype == torch.float16)
    for step in range(3):
        batch = rows_of(model, tokens(step))
        for index in range(parts):
            rows = {name: value.chunk(parts)[index] for name, value in batch.items()}
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = model(**rows)
            scaler.scale(loss / parts).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.by_day("3-torch.bfloat16-skewed")
@pytest.mark.slow
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "skewed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zero", [0, 3])
def test_listed_experts_that_ranks_share_make_rows_of_another_dtype(
    world2: World, dtype: torch.dtype, zero: int, skewed: bool
) -> None:
    plan: Constraints = {DP: 2, EP: 2, ZERO: zero}
    with_rounding = with_listed_experts(None, dtype, skewed)
    without = with_listed_experts(None, torch.float32, skewed)
    for found in world2.run(with_listed_experts, plan, dtype, skewed):
        for name, expected in with_rounding.items():
            # Rows of all ranks are multiplied at once: other rounding, and no more of it.
            rounded = float((expected - without[name]).abs().max())
            assert float((found[name] - without[name]).abs().max()) <= 2 * rounded + 1e-6, name
