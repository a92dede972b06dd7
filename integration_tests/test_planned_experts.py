"""What the planner says of experts that ranks share, beside what ranks hold and send."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import vescale
from vescale_dtensor import CommCounter, DTensor
from vescale_planner import Cluster, predict
from vescale_testing import World

from .experts import AllInDouble, adamw, build, rows_of, tokens
from .fake_ranks import WARM_UP
from .plans import DP, EP, PP, TP, ZERO, Constraints, make_plan

H100 = Cluster.preset("h100")
ITEMSIZE = 8  # of what `build` makes


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds, of what it computes with and what it owns."""

    whole: int
    largest: int
    shard: int
    gradients: int
    states: int


def held(family: str, plan: Constraints) -> Held:
    """Train a step and return what is there behind it."""
    model: Any = build(family, "batched_mm")
    model, optimizer = vescale.parallelize(make_plan(plan), model, adamw)
    with AllInDouble():
        model(**rows_of(model, tokens(0))).loss.backward()
    optimizer.step()
    units: dict[str, int] = {}
    for param in model._vescale_engine.parameters.params:
        if param.unsharded is None:
            continue
        _, _, behind = param.fqns[0].partition("layers.")
        unit = behind.partition(".")[0]
        units[unit] = units.get(unit, 0) + param.unsharded.numel() * ITEMSIZE
    states = [x for each in optimizer.state.values() for x in each.values()]
    return Held(
        whole=sum(units.values()),
        largest=max(units.values()),
        shard=sum(map(_local_bytes, model.parameters())),
        gradients=sum(_local_bytes(p.grad) for p in model.parameters()),
        states=sum(map(_local_bytes, states)),
    )


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if local.dim() == 0 else local.numel() * local.element_size()


def check_memory(world: World, family: str, constraints: Constraints) -> None:
    """Compare what ranks hold with the prediction, which is of the mean of them."""
    plan, ranks = make_plan(constraints), world.run(held, family, constraints)
    model = build(family, "batched_mm")
    # Of the step's first pass the gradients come as activations go.
    summed = make_plan({**constraints, "batch.gradient_accumulation": 2})
    memory = predict(model, summed, H100).memory[0]
    (whole,), (largest,) = {each.whole for each in ranks}, {each.largest for each in ranks}
    outside = sum(p.nbytes for n, p in model.named_parameters() if ".layers." not in n)

    def mean(name: str) -> float:
        return sum(getattr(each, name) for each in ranks) / len(ranks)

    zero = plan.data_parallel.zero_stage
    assert memory.optimizer == pytest.approx(mean("states"), rel=1e-12)
    is_cut = zero > 0 and plan.data_parallel.size > plan.expert_parallel.size
    if zero < 3:
        assert memory.parameters == pytest.approx(whole, rel=1e-12)
    else:
        # What is in no block, the block that runs and the next.
        gathered = outside + 2 * largest if is_cut else 0
        least = mean("shard") + (outside + largest if is_cut else 0)
        assert least <= memory.parameters <= mean("shard") + gathered
    if zero < 2:
        assert memory.gradients == pytest.approx(whole, rel=1e-12)
    else:
        # And as long what is in no block, whole, with what is sent and arrives of a block.
        expected = mean("gradients") + (outside / 2 if is_cut else 0) + 2 * largest
        assert memory.gradients == pytest.approx(expected, rel=1e-12)


FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")


@pytest.mark.by_day("3")
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_memory_of_mixtral_is_what_four_ranks_hold(world4: World, zero: int) -> None:
    check_memory(world4, "mixtral", {DP: 4, EP: 2, ZERO: zero})


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("size", [2, 4])
def test_memory_is_what_four_ranks_hold(world4: World, family: str, zero: int, size: int) -> None:
    check_memory(world4, family, {DP: 4, EP: size, ZERO: zero})


@pytest.mark.nightly
@pytest.mark.parametrize("zero", range(4))
def test_memory_of_two_ranks_that_share_experts(world2: World, zero: int) -> None:
    check_memory(world2, "qwen3_moe", {DP: 2, EP: 2, ZERO: zero})


def kept(family: str, plan: Constraints | None) -> int:
    """Return the bytes that a forward of half of the rows keeps for backward, without parameters.

    Of distinct storages, in float32, as on a CPU grouped products have no float64.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
    }
    model: Any = build(family, "grouped_mm", **sizes).float()
    batch = {name: rows[: len(rows) // 2] for name, rows in tokens(0).items()}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    if plan is not None:
        model = vescale.parallelize(make_plan(plan), model)
        batch = rows_of(model, tokens(0))
        params = [p.unsharded for p in model._vescale_engine.parameters.params]
        own = {p.untyped_storage().data_ptr() for p in params if p is not None}
    model(**batch).loss.backward()  # a first call compares inputs
    found: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(**batch)
    return sum(nbytes for nbytes, _ in found.values())


@pytest.mark.by_day("mixtral")
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["mixtral", *FAMILIES[1:]],
)
def test_activations_of_ranks_that_share_experts_are_on_average_those_of_one_device(
    world2: World, family: str
) -> None:
    ranks = world2.run(kept, family, {DP: 2, EP: 2})
    # Integers come on top, that say in which order rows were sent.
    assert sum(ranks) / 2 == pytest.approx(kept(family, None), rel=0.01)


WIDTH, EXPERTS, CHOSEN, LENGTH, ROWS = 6, 4, 2, 8, 4


class Stack(nn.Module):
    """Experts of one matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.how_many = EXPERTS

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = (rows[:, None, None] @ self.weight[chosen])[:, :, 0]
        return (made * weights[..., None]).sum(1)


class Block(nn.Module):
    """Its tokens go to all experts in turn, so that each gets as many."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.experts = nn.Linear(WIDTH, CHOSEN), Stack()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        turns = torch.arange(len(rows), device=x.device)[:, None] + torch.arange(CHOSEN)
        return x + self.experts(rows, turns % EXPERTS, self.weights(rows)).view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(seed: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def sent(plan: Constraints) -> int:
    """Return the bytes of rows that this rank sends to experts, and back, in a step."""
    model = vescale.parallelize(make_plan(plan), Model())
    own = batch(vescale.data_parallel_rank(model))
    for _ in range(WARM_UP):
        model(own).backward()
    with CommCounter() as counter:
        model(own).backward()
    found = [e for e in counter.events if (e.kind, e.over) == ("all_to_all", "ep")]
    return sum(event.nbytes for event in found if event.dtype == torch.float32)


@pytest.mark.by_day("2-none-4")
@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "times"), [("none", 4), ("full", 6)])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_send_the_bytes_that_are_priced(
    world4: World, recompute: str, times: int, size: int
) -> None:
    """Rows there and back, in each direction; of all experts a rank has its part itself."""
    # Then no gradients are sent in all-to-alls.
    plan = {DP: 4, EP: size, "recompute": recompute, "data_parallel.reduction": "library"}
    rows = 3 * ROWS * LENGTH * CHOSEN * WIDTH * 4
    expected = times * rows * (size - 1) / size
    assert world4.run(sent, plan) == [expected] * 4
    bare = replace(H100, intra_latency_seconds=0.0, inter_latency_seconds=0.0)
    found = predict(Model(), make_plan(plan), bare, example_batch=batch(0)).breakdown
    assert found.expert_parallel * bare.inside_bytes_per_second == pytest.approx(expected)


def sent_for_data(family: str, plan: Constraints) -> int:
    """Return the bytes of parameters and gradients that this rank sends in a step."""
    model: Any = build(family, "batched_mm")
    model, optimizer = vescale.parallelize(make_plan(plan), model, adamw)

    def step() -> None:
        with AllInDouble():
            model(**rows_of(model, tokens(0))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    with CommCounter() as counter:
        step()
    return sum(e.nbytes for e in counter.events if e.kind != "all_to_all" and e.nbytes > 2**10)


@pytest.mark.by_day("1-2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "size"),
    [
        (1, 2),
        *[(0, 2), (2, 2), (0, 4)],
    ],
)
def test_gradients_of_experts_are_sent_to_the_ranks_that_have_them(
    world4: World, zero: int, size: int
) -> None:
    plan = {DP: 4, EP: size, ZERO: zero, "data_parallel.reduction": "library"}
    counted = world4.run(sent_for_data, "qwen3_moe", plan)
    bare = replace(H100, intra_latency_seconds=0.0, inter_latency_seconds=0.0, overlap=0.0)
    found = predict(build("qwen3_moe", "batched_mm"), make_plan(plan), bare).breakdown
    # Rows of shards are padded to multiples of 128 bytes.
    for nbytes in counted:
        priced = found.data_parallel * bare.inside_bytes_per_second
        assert priced == pytest.approx(nbytes, rel=0.03)


def test_a_plan_with_all_axes_is_priced() -> None:
    plan = make_plan({DP: 2, EP: 2, TP: 2, PP: 2, "pipeline_parallel.microbatches": 2})
    found = predict(build("mixtral", "batched_mm"), plan, H100, example_batch=tokens(0))
    assert found.breakdown.expert_parallel > 0
