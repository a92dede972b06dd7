"""Which modules stack experts, and what is proven of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._expert_parallel.experts import (
    Combination,
    bound,
    combined,
    num_stacked,
    sorted_by_expert,
)
from vescale_parallel._expert_parallel.find import find_experts, planned_experts
from vescale_parallel._expert_parallel.layers import expert_layers
from vescale_parallel._plan.constraints import with_constraints
from vescale_parallel._plan.plan import ParallelPlan


class Stack(nn.Module):
    """Four experts; ``made`` computes what an expert makes of a row."""

    def __init__(self, experts: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden, hidden))
        self.bias = nn.Parameter(torch.randn(experts, hidden))
        self.how_many, self.width, self.is_gated = experts, hidden, True

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        for expert in range(self.how_many):
            row, slot = torch.where(chosen == expert)
            made = self.made(rows[row] @ self.weight[expert] + self.bias[expert])
            total.index_add_(0, row, made * weights[row, slot, None])
        return total

    def made(self, rows: Tensor) -> Tensor:
        return rows.tanh()


class Normalized(Stack):
    """What an expert makes of a row depends on its other rows."""

    def made(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(0) if len(rows) else rows


class Dropping(Stack):
    def made(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(rows, 0.5, self.training)


class FirstTwo(Stack):
    """Weights of more than two experts are cut."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows, chosen, torch.stack([*weights[:, :2].unbind(1)] * 2, 1))


class WeighsAll(Stack):
    """Takes a batch of rows, and a weight of each expert."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = super().forward(rows.flatten(0, 1), chosen, weights.gather(1, chosen))
        assert weights.shape[1] == self.how_many
        return made.view(len(rows), -1, rows.shape[-1])


class AllRows(nn.Module):
    """Not chosen by row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight


class Listed(nn.Module):
    """All experts have a part in all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        weights = self.router(rows).softmax(-1)
        made = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            made = made + expert(rows) * weights[..., index, None]
        return made


class Moe(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), experts


def transformers_experts(family: str, implementation: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, hidden_size=16, intermediate_size=12, moe_intermediate_size=12,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        vocab_size=32, num_local_experts=8, num_experts=8, num_experts_per_tok=3, pad_token_id=0,
    )  # fmt: skip
    config._experts_implementation = implementation
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    ("implementation", "combination"),
    [("eager", "ascending"), ("batched_mm", "slots"), ("grouped_mm", "slots")],
)
def test_transformers_models_say_how_they_add_up(
    family: str, implementation: str, combination: str
) -> None:
    model = transformers_experts(family, implementation)
    experts = find_experts(model, 4)
    (found,) = experts.stacked
    assert (found.num_experts, found.attributes) == (8, ("num_experts",))
    assert found.combination == combination
    assert experts.parameters(model, 4) == {
        name: None for name, _ in model.named_parameters() if ".experts." in name
    }


@pytest.mark.parametrize("count", [2, 4])  # of two, each row goes to all
def test_weights_may_be_of_all_experts(count: int) -> None:
    (found,) = find_experts(Moe(WeighsAll(count)), 2).stacked
    assert (found.num_experts, found.attributes) == (count, ("how_many",))
    assert found.weighs_all
    assert not find_experts(Moe(Stack(count)), 2).stacked[0].weighs_all


def test_integers_that_count_experts_are_found_among_others() -> None:
    (found,) = find_experts(Moe(Stack(experts=6, hidden=6)), 3).stacked
    assert "how_many" in found.attributes
    assert found.fqn == "experts"
    (found,) = find_experts(Moe(Stack()), 2).stacked
    assert found.attributes == ("how_many",)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_large_models_are_tried_on_one_of_fewer_experts(size: int, implementation: str) -> None:
    """Whose other integers, as features that are as many as its experts, count nothing."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(num_hidden_layers=2, num_experts=72, num_experts_per_tok=8)
    config._experts_implementation = implementation
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = find_experts(model, size).stacked
    assert [each.num_experts for each in found] == [72, 72]
    assert {each.attributes for each in found} == {("num_experts",)}
    with pytest.raises(ValueError, match="size 5 does not divide the 72 experts"):
        find_experts(model, 5)


def test_layers_with_experts_are_told_by_their_shapes() -> None:
    model = nn.Sequential(Moe(Stack()), nn.Linear(6, 6), Moe(Dropping()))
    first, last = expert_layers(model)
    assert (first.fqn, first.num_experts, first.is_listed) == ("0.experts", 4, False)
    assert first.parameters == ("0.experts.weight", "0.experts.bias")
    assert (first.called, last.called) == (("0.experts",), ("2.experts",))


def test_a_list_of_layers_is_no_list_of_experts() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, ids: Tensor, mask: Any = None, positions: Any = None) -> Tensor:
            raise AssertionError("it takes three arguments, and is not run")

    names = [f"layers.{index}" for index in range(3)]
    assert expert_layers(Layers(), names) == ()


def test_lists_of_experts_have_a_router_beside_them() -> None:
    (found,) = expert_layers(nn.Sequential(Listed(), nn.Linear(6, 6)))
    assert (found.fqn, found.num_experts, found.is_listed) == ("0", 3, True)
    assert found.called == tuple(f"0.experts.{index}" for index in range(3))
    assert found.parameters[:2] == ("0.experts.0.weight", "0.experts.0.bias")


def test_finding_draws_and_changes_nothing() -> None:
    model = Moe(Stack())
    before = torch.get_rng_state(), {name: p.clone() for name, p in model.named_parameters()}
    find_experts(model, 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(p, before[1][name]) for name, p in model.named_parameters())
    assert isinstance(model.experts, Stack)
    assert model.experts.how_many == 4


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (Normalized, r"'experts' stacks experts, .*not the sum of what each expert makes"),
        (FirstTwo, r"'experts' stacks experts"),
        (AllRows, r"found no experts in Moe"),
        (lambda: Stack(experts=5), r"does not divide the 5 experts of 'experts'.*\[1, 5\]"),
    ],
)
def test_other_modules_are_refused(experts: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_experts(Moe(experts()), 2)


def test_stacks_that_draw_random_numbers_in_training_are_found() -> None:
    for model in (Moe(Dropping()), Owner(DroppingBatched())):
        assert find_experts(model, 2).stacked[0].draws
    for model in (Moe(Stack()), Owner(Batched())):
        assert not find_experts(model, 2).stacked[0].draws


@pytest.mark.parametrize("other", ["pipeline_parallel", "context_parallel"])
def test_experts_that_draw_are_refused_where_their_numbers_are_counted(other: str) -> None:
    sizes = {f"{other}.size": 2, "data_parallel.size": 2, "expert_parallel.size": 2}
    plan = with_constraints(ParallelPlan(), sizes)
    with pytest.raises(ValueError, match=r"'experts', which has experts, draws random numbers"):
        planned_experts(plan, Moe(Dropping()))
    assert planned_experts(plan, Moe(Stack())).stacked


def test_a_stack_has_parameters_of_its_own_with_one_first_dim() -> None:
    assert num_stacked(Stack()) == 4
    other = Stack()
    other.bias = nn.Parameter(torch.randn(3, 6))
    assert num_stacked(other) == 0
    other = Stack()
    other.norm = nn.LayerNorm(6)
    assert num_stacked(other) == 0
    assert num_stacked(nn.Linear(4, 4)) == num_stacked(nn.MultiheadAttention(4, 2)) == 0
    assert num_stacked(AllRows()) == 0


def test_a_call_is_rows_experts_and_weights_in_any_form() -> None:
    rows, chosen, weights = torch.ones(2, 6), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2)
    named: dict[str, Any] = {"weights": weights, "chosen": chosen}
    assert bound(Stack().forward, (rows,), named) == (rows, chosen, weights)
    with pytest.raises(TypeError, match=r"rows, experts and weights .*got \['Tensor', 'int', "):
        bound(Stack().forward, (rows, 3, weights), {})


def test_pairs_are_sorted_by_expert_then_token_then_slot() -> None:
    index = torch.tensor([[3, 0], [0, 1], [1, 3]])
    order, counts = sorted_by_expert(index, 4)
    assert order.tolist() == [1, 2, 3, 4, 0, 5]
    assert counts.tolist() == [2, 2, 0, 2]
    assert sorted_by_expert(torch.tensor([[4, 0]]), 4)[1].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("combination", ["slots", "ascending"])
def test_rows_are_added_in_the_order_that_the_module_has(combination: Combination) -> None:
    rows = torch.tensor([[[1e8], [1.0], [-1e8]]])
    weights, index = torch.ones(1, 3), torch.tensor([[2, 0, 1]])
    made = combined(rows, index, weights, combination)
    expected = {"slots": rows.sum(1), "ascending": (rows[:, 1] + rows[:, 2]) + rows[:, 0]}
    assert torch.equal(made, expected[combination])


class Batched(nn.Module):
    """As many rows for each expert, on the first dim or flat."""

    def __init__(self, *, is_flat: bool = False) -> None:
        super().__init__()
        self.weight, self.is_flat = nn.Parameter(torch.randn(4, 6, 6)), is_flat
        self.how_many = 4

    def forward(self, x: Tensor) -> Tensor:
        assert self.is_flat or len(x) == self.how_many
        rows = x.view(self.how_many, -1, 6) if self.is_flat else x
        return self.made(rows @ self.weight).view(x.shape)

    def made(self, rows: Tensor) -> Tensor:
        return rows.tanh()


class OverRows(Batched):
    def made(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(1, keepdim=True)


class OverExperts(Batched):
    def made(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(0)


class DroppingBatched(Batched):
    def made(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(rows, 0.5, self.training)


class Owner(Moe):
    """Gives all experts all rows, times their scores."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        rows = flat * self.router(flat).softmax(-1).T[..., None]
        is_flat = getattr(self.experts, "is_flat", False)
        made = self.experts(rows.flatten(0, 1) if is_flat else rows)
        return made.view(4, *x.shape).sum(0)


class Broadcasting(Owner):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        return (self.experts(flat) * self.router(flat).T[..., None]).sum(0).view_as(x)


@pytest.mark.parametrize(("is_flat", "num_dims"), [(True, 2), (False, 3)])
def test_experts_that_take_as_many_rows_each_are_found(is_flat: bool, num_dims: int) -> None:
    (found,) = find_experts(Owner(Batched(is_flat=is_flat)), 2).stacked
    assert (found.num_dims, found.num_experts) == (num_dims, 4)
    assert found.attributes == ("how_many",)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (OverRows, "depends on other rows or experts"),
        (OverExperts, "depends on other rows or experts"),
    ],
)
def test_rows_of_experts_that_depend_on_others_are_refused(kind: type[Batched], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find_experts(Owner(kind()), 2)


def test_experts_that_have_all_rows_at_once_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'experts' stacks matrices, but .*not return a row for each"
    ):
        find_experts(Broadcasting(AllRows()), 2)


class Gathering(nn.Module):
    """Takes the weights of each row's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        return torch.einsum("tkio,ti->tko", self.weight[chosen], rows)


class Together(nn.Module):
    """The router's parameter is beside the stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.router = nn.Parameter(torch.randn(4, 6, 6)), nn.Linear(6, 4)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (lambda: Moe(Gathering()), r"'experts' stacks .* its forward takes \(rows, chosen\)"),
        (lambda: nn.Sequential(Together()), r"not all of its .* stacks of 4 \('router.weight'"),
    ],
)
def test_errors_say_what_is_in_the_way(kind: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find_experts(kind(), 2)


class Codes(nn.Module):
    """A codebook, whose forward can be called with more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6, 6))

    def forward(self, x: Tensor, mask: Any = None, temperature: float = 1.0) -> Tensor:
        return (x @ self.weight).softmax(-1).sum(0) * temperature


def test_codebooks_beside_experts_stay_as_they_are() -> None:
    found = find_experts(nn.Sequential(Moe(Stack()), Codes()), 2).stacked
    assert [each.fqn for each in found] == ["0.experts"]
    with pytest.raises(ValueError, match=r"'codes' stacks matrices, but .* not divide its 5"):
        find_experts(nn.ModuleDict({"codes": Codes()}), 2)


def attributes() -> nn.Module:
    model = nn.Module()
    model.gate = nn.Linear(6, 3)
    for index in range(3):
        model.add_module(f"expert_{index}", nn.Linear(6, 6))
    return model


def with_experts(experts: nn.Module, count: int = 3) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({"router": nn.Linear(6, count), "experts": experts})


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            with_experts(nn.ParameterList(torch.ones(6, 6) for _ in range(3))),
            r"'experts' is a list of 3 parameters of one shape beside a router: make a module of",
        ),
        (attributes, r"'Module' has 3 .* as attributes \('expert_0' to 'expert_2'\) beside a rou"),
        (
            with_experts(nn.ModuleList(nn.Linear(6, 6 + each) for each in range(3))),
            r"'experts' is a list beside a router, but its .* shapes \(\[\(6, 6\), \(6,\)\] and",
        ),
        (
            with_experts(nn.ModuleList([nn.Linear(6, 6), nn.Identity()]), 2),
            r"'experts' is a list beside a router, but its modules are of Linear and Identity",
        ),
    ],
    ids=["parameters", "attributes", "sizes", "kinds"],
)
def test_errors_say_what_is_nearest(kind: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find_experts(kind(), 2)
