"""Biases that modules add to partial sums by themselves: one tensor-parallel rank adds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_parallel import explain, propose_sharding
from vescale_testing import World

from .experts import build, tokens
from .odd_models import Loss
from .plans import DP, SEQUENCE, TP, ZERO, Constraints
from .test_bad_input import check as check_refusal
from .test_expert_parallel import check
from .test_expert_tensor_parallel import WIDE, in_float32
from .training import whole


class Products(nn.Module):
    """Two products and their biases, without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8, 6))
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.up + self.up_bias) @ self.down + self.down_bias


class TiedBias(nn.Module):
    """Two modules that add one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Products(), Products()
        self.second.down_bias = self.first.down_bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Products() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def convolutions() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def transposed() -> nn.Module:
    layers = nn.ConvTranspose1d(6, 8, 3), nn.GELU(), nn.ConvTranspose1d(8, 4, 3)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten())


Made = tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]
MODELS: dict[str, Made] = {
    "products": (Products, (6,), ["down_bias"]),
    "products_in_a_list": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Products()), (6,), ["2.down_bias"],
    ),
    "blocks": (Blocks, (6,), ["blocks.*.down_bias"]),
    "convolutions": (convolutions, (3, 8, 8), ["2.bias"]),
    "transposed": (transposed, (6, 5), ["2.bias"]),
}  # fmt: skip


def train(name: str, constraints: Constraints | None) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses of three steps, and parameters behind them."""
    make, shape, _ = MODELS[name]
    torch.manual_seed(0)
    model: Any = Loss(make()).double()
    rows, part, parts = torch.randn(8, *shape, dtype=torch.float64), 0, 1
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if constraints is not None:
        world_size = torch.distributed.get_world_size()
        plan = vescale.generate_plan(model, constraints, world_size=world_size, example_batch=rows)
        model, optimizer = vescale.parallelize(
            plan, model, lambda each: torch.optim.AdamW(each.parameters(), lr=1e-2)
        )
        part, parts = vescale.data_parallel_rank(model), plan.data_parallel.size
    losses = list[float]()
    for _ in range(3):
        loss = model(rows.chunk(parts)[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: whole(each.detach()).clone() for name, each in model.named_parameters()}


def assert_one_devices(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        # Sums are in another order, and AdamW divides by the roots of small squares.
        torch.testing.assert_close(found[name], parameter, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_is_to_add_them(name: str) -> None:
    make, shape, biases = MODELS[name]
    found = propose_sharding(make(), "auto", 2, example_batch=torch.randn(8, *shape))
    reads = {f"{bias}.<read>" for bias in biases}
    assert reads <= found.plan.keys()


def test_one_that_two_sums_have_leaves_them_whole() -> None:
    found = propose_sharding(TiedBias(), "auto", 2, example_batch=torch.randn(8, 6))
    assert not found.plan
    assert any("is used by add" in why for why in found.left_whole.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_is_one_devices(world2: World, name: str) -> None:
    losses, parameters = train(name, None)
    for found, found_parameters in world2.run(train, name, {TP: 2}):
        assert found == pytest.approx(losses, rel=1e-12)
        assert_one_devices(found_parameters, parameters)


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_blocks_have_the_bits_of_eager_ones(world2: World) -> None:
    written = world2.run(train, "blocks", {TP: 2})
    compiled = world2.run(
        train, "blocks", {TP: 2, "compile": "blocks", "compile_backend": "aot_eager"}
    )
    for (losses, parameters), (expected, others) in zip(compiled, written, strict=True):
        assert losses == expected
        assert all(torch.equal(parameters[name], other) for name, other in others.items())


@pytest.mark.by_day("1")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_training_beside_data_parallelism_is_one_devices(world4: World, zero: int) -> None:
    losses, parameters = train("convolutions", None)
    runs = world4.run(train, "convolutions", {TP: 2, DP: 2, ZERO: zero})
    assert [sum(each) / 4 for each in zip(*(run for run, _ in runs), strict=True)] == (
        pytest.approx(losses, rel=1e-12)
    )
    for _, found in runs:
        assert_one_devices(found, parameters)


EXPERTS = "model.layers.*.mlp.experts"


@pytest.mark.by_day("grouped_mm-False")
@pytest.mark.parametrize(
    ("implementation", "sequence"),
    [*itertools.product(["batched_mm", "grouped_mm"], [False, True])],
)
def test_all_weights_of_experts_with_biases_are_cut(implementation: str, sequence: bool) -> None:
    model = build("gpt_oss", implementation, **WIDE).float()
    found = propose_sharding(model, "auto", 2, sequence=sequence, example_batch=tokens(0))
    names = {f"{EXPERTS}.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj")}
    assert names <= found.plan.keys()
    assert found.plan[f"{EXPERTS}.down_proj_bias.<read>"] == "Partial()"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_experts_with_biases_are_one_devices(world2: World, sequence: bool) -> None:
    constraints = {DP: 1, TP: 2, SEQUENCE: sequence}
    check(world2, constraints, "gpt_oss", "batched_mm", skewed=True)


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True])
def test_grouped_experts_with_biases_are_one_devices(world4: World, sequence: bool) -> None:
    expected, _ = in_float32(None, "gpt_oss")
    for made, _ in world4.run(in_float32, {DP: 1, TP: 4, SEQUENCE: sequence}, "gpt_oss"):
        # Norms and losses: rounding of float32 over two steps of AdamW.
        assert made == pytest.approx(expected, rel=1e-4)


def explained() -> str:
    rows = torch.randn(8, 6)
    plan = vescale.generate_plan(Loss(Products()), {TP: 2}, world_size=2, example_batch=rows)
    model = vescale.parallelize(plan, Loss(Products()))
    with explain(model) as explanation:
        model(rows).backward()
    return str(explanation)


@pytest.mark.slow
def test_explain_names_them(world2: World) -> None:
    assert "down_bias on rank 0" in world2.run(explained)[0]


def marked(pattern: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    cut = {"0.weight": "Shard(0)", "2.weight": "Shard(1)", pattern: "Partial()"}
    plan = vescale.generate_plan(
        model, {TP: 2, "tensor_parallel.sharding_policy": "manual",
                "tensor_parallel.sharding_plan": cut}, world_size=2,
    )  # fmt: skip
    vescale.parallelize(plan, model)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["0.bias.<read>", "2.bias.<read>"])
def test_the_mark_is_refused_where_nothing_is_added_by_hand(world2: World, pattern: str) -> None:
    check_refusal(world2, ValueError, r"bias.<read> is for a whole parameter", marked, pattern)
