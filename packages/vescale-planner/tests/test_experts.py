"""Experts that ranks share: what a search tries, what it costs, and what it returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from vescale_parallel import (
    DataParallel,
    ExpertParallel,
    ParallelPlan,
    TensorParallel,
    expert_layers,
    planned_experts,
    with_constraints,
)
from vescale_planner import Cluster, explain_plan, generate_plan, predict
from vescale_planner._constraints import refuses_experts
from vescale_planner._generate import _prepared
from vescale_planner._space.candidates import REPLICATE, SHARE_STATE
from vescale_planner._workload import workload_of

H100 = Cluster.preset("h100")
WIDTH, EXPERTS, CHOSEN, LENGTH = 64, 8, 2, 16
EP, TP, DP = "expert_parallel.size", "tensor_parallel.size", "data_parallel.size"


class Stack(nn.Module):
    """Experts of one matrix each."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))
        self.how_many = experts

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = (rows[:, None, None] @ self.weight[chosen])[:, :, 0]
        return (made * weights[..., None]).sum(1)


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).topk(CHOSEN)
        return x + self.experts(rows, chosen, weights).view_as(x)


class Mixture(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(Stack()) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Drawing(Stack):
    """Whose forward draws, so that ranks cannot share its experts."""

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(rows + torch.rand_like(rows), chosen, weights)


class Listed(nn.Module):
    """All tokens go to all experts of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(
            (expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts)),
            torch.zeros_like(x),
        )


BATCH = torch.ones(4, LENGTH, WIDTH)


Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


def sizes_tried(model: nn.Module, constraints: dict[str, Any], world_size: int = 8) -> set[int]:
    search = _prepared(model, constraints, H100, 2, BATCH)
    result = search.run(world_size)
    return {each.candidate.layout.ep for each in (*result.fits, *result.too_large)}


def test_what_is_sent_was_observed() -> None:
    workload = workload_of(Mixture(), BATCH)
    assert workload.observed
    for part in workload.blocks:
        assert part.sent_bytes == LENGTH * CHOSEN * WIDTH * 4
        assert part.num_exchanges == 1
        assert sum(p.numel for p in part.parameters if p.num_experts) == EXPERTS * WIDTH**2
    assert workload.before.sent_bytes == workload.after.sent_bytes == 0


def test_rows_of_listed_experts_were_observed() -> None:
    workload = workload_of(nn.Sequential(Listed(), Listed()), BATCH)
    assert workload.observed
    assert sum(part.sent_bytes for part in workload.parts) == 2 * 3 * LENGTH * WIDTH * 4
    assert sum(part.num_exchanges for part in workload.parts) == 2


def test_without_a_batch_the_configuration_says_how_many_experts_a_token_has() -> None:
    model: Any = Mixture()
    unknown = workload_of(model, None)
    assert any("every token is sent to 2 experts" in note for note in unknown.assumptions)
    model.config = type("Config", (), {"num_experts_per_tok": 4})()
    known = workload_of(model, None)
    assert not any("every token is sent" in note for note in known.assumptions)
    router = EXPERTS * WIDTH
    # Tokens ask for 4 of 8 experts.
    flops = 2 * (EXPERTS * WIDTH**2 * 4 / 8 + router) * known.tokens
    assert known.blocks[0].flops == pytest.approx(flops)
    assert known.blocks[0].sent_bytes == pytest.approx(4 * known.blocks[0].output_bytes)


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        ({}, {1, 2, 4, 8}),
        ({DP: 4}, {1, 2, 4}),
        ({TP: 8}, {1}),
        ({EP: 4}, {4}),
        ({EP: 1}, {1}),
        ({REPLICATE: 2}, {1, 2}),
        ({REPLICATE: 2, SHARE_STATE: 1, "data_parallel.zero_stage": 3}, {1}),
        ({"compile": "blocks"}, {1, 2, 4, 8}),
        ({"precision.param": "bfloat16", "data_parallel.reduction": "library"}, {1, 2, 4, 8}),
    ],
)
def test_sizes_that_are_tried(constraints: dict[str, Any], expected: set[int]) -> None:
    tensor = {} if TP in constraints else {TP: 1}
    plan = {"blocks.*.experts.weight": "Shard(1)"} if TP in constraints else None
    given = {**tensor, **constraints} | (
        {"tensor_parallel.sharding_plan": plan} if plan is not None else {}
    )
    assert sizes_tried(Mixture(), given) == expected


def test_what_plans_refuse_beside_shared_experts_is_asked_of_plans() -> None:
    assert refuses_experts({"numerics": "invariant"})
    assert not refuses_experts({"compile": "blocks"})
    assert not refuses_experts({"recompute": "full", DP: 6, "batch.global_size": 6})


@pytest.mark.parametrize("observed", [False, True])
def test_a_size_that_is_asked_for_is_obeyed(observed: bool) -> None:
    given = {EP: 2, "batch.global_size": 8}
    batch = BATCH if observed else None
    plan = generate_plan(Mixture(), given, world_size=4, cluster=H100, example_batch=batch)
    assert plan.expert_parallel.size == 2
    assert plan.world_size == 4


def test_dense_models_are_searched_as_they_were() -> None:
    dense = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    assert expert_layers(dense) == ()
    assert sizes_tried(dense, {TP: 1}) == {1}


def test_lists_are_shared_as_far_as_all_ranks_get_as_many() -> None:
    assert sizes_tried(Listed(), {TP: 1}, 6) == {1, 3}


def test_the_smaller_memory_of_shared_experts_is_chosen_and_said() -> None:
    given = {
        TP: 1, "pipeline_parallel.size": 1, "data_parallel.zero_stage": 0,
        "batch.gradient_accumulation": 1, "recompute": "none",
    }  # fmt: skip
    whole = generate_plan(
        Mixture(), {**given, EP: 1}, world_size=4, cluster=H100, example_batch=BATCH
    )
    assert whole.estimate is not None
    small = replace(H100, memory_bytes=whole.estimate.memory_bytes - 1)
    plan = generate_plan(Mixture(), given, world_size=4, cluster=small, example_batch=BATCH)
    assert plan.expert_parallel.size > 1
    said = f"data parallel 4, expert parallel {plan.expert_parallel.size}: "
    assert plan.reasons[0].startswith(said)
    assert "tokens to experts and back" in plan.reasons[0]
    assert any("all experts get as many tokens" in reason for reason in plan.reasons)
    found = explain_plan(Mixture(), given, world_size=4, cluster=small, example_batch=BATCH)
    assert found.plan.expert_parallel == plan.expert_parallel
    assert "expert parallel" in str(found)
    assert "expert" in found.to_html()


def test_plans_as_fast_go_to_the_simpler_one() -> None:
    """With links that cost nothing and a large batch little is won by experts elsewhere."""
    free = replace(H100, intra_bytes_per_second=1e18, intra_latency_seconds=0.0)
    given = {
        TP: 1, "data_parallel.zero_stage": 0, "pipeline_parallel.size": 1,
        "batch.global_size": 2**16,
    }  # fmt: skip
    found = explain_plan(Mixture(), given, world_size=2, cluster=free, example_batch=BATCH)
    assert found.plan.expert_parallel.size == 1
    assert any("expert parallel 2" in reason for reason in found.plan.reasons)


def test_experts_that_ranks_cannot_share_are_said_once() -> None:
    model = Mixture()
    for block in model.blocks:
        block.experts = Drawing()
    given = {TP: 1, "pipeline_parallel.size": 1}
    plan = generate_plan(model, given, world_size=8, cluster=H100, example_batch=BATCH)
    assert plan.expert_parallel.size == 1
    with pytest.raises(ValueError, match="draws random numbers"):
        generate_plan(model, {**given, EP: 2}, world_size=8, cluster=H100, example_batch=BATCH)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_has_its_part_of_experts_and_zero_shards_the_rest(zero: Stage, size: int) -> None:
    """By hand, of one pipeline rank of eight: elements of 4 bytes, two states."""
    dense, experts = 4 * (WIDTH + 1) * (WIDTH + 4 * EXPERTS), 4 * 4 * EXPERTS * WIDTH**2
    plan = ParallelPlan(
        data_parallel=DataParallel(size=8, zero_stage=zero),
        expert_parallel=ExpertParallel(size=size),
    )
    plan = with_constraints(plan, {"batch.gradient_accumulation": 2})
    memory = predict(Mixture(), plan, H100, example_batch=BATCH).memory[0]
    shard = 8 // size if zero else 1
    whole = dense + experts / size
    assert memory.optimizer == pytest.approx(2 * whole / shard)
    block = 4 * (WIDTH + 1) * EXPERTS + experts / 4 / size
    outside = whole - 4 * block
    if zero < 2:
        assert memory.gradients == pytest.approx(whole)
    else:  # of one block whole, and what arrives of it; of what is in none until the step ends
        rest = outside * (1 - 1 / shard) + 2 * block
        assert memory.gradients == pytest.approx(whole / shard + rest)
    if zero < 3:
        assert memory.parameters == pytest.approx(whole)
    else:
        gathered = 2 * block + outside if shard > 1 else 0.0
        assert memory.parameters == pytest.approx(whole / shard + gathered)


def test_tensor_parallel_ranks_have_their_part_of_experts_that_are_cut() -> None:
    def states(cut: str) -> float:
        plan = ParallelPlan(
            data_parallel=DataParallel(size=2),
            expert_parallel=ExpertParallel(size=2),
            tensor_parallel=TensorParallel(
                size=2, sharding_policy="manual", sharding_plan={cut: "Shard(1)"}
            ),
        )
        return predict(Mixture(), plan, H100, example_batch=BATCH).memory[0].optimizer

    numel = sum(p.numel() for p in Mixture().parameters())
    experts = 4 * EXPERTS * WIDTH**2
    assert states("blocks.*.experts.weight") == pytest.approx(8 * (numel - 3 / 4 * experts))
    routers = 4 * EXPERTS * WIDTH
    assert states("blocks.*.router.weight") == pytest.approx(
        8 * (numel - experts / 2 - routers / 2)
    )


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_tokens_stay_in_a_node_that_has_all_ranks_that_share_experts(zero: Stage) -> None:
    """Those are next to each other, but under ZeRO 3, where those that gather are."""
    free = replace(H100, intra_latency_seconds=0.0, inter_latency_seconds=0.0)

    def seconds(tp: int) -> float:
        plan = ParallelPlan(
            tensor_parallel=TensorParallel(size=tp),
            data_parallel=DataParallel(size=64 // tp, zero_stage=zero),
            expert_parallel=ExpertParallel(size=8),
        )
        return predict(Mixture(), plan, free, example_batch=BATCH).breakdown.expert_parallel

    sent = 4 * 4 * len(BATCH) * LENGTH * CHOSEN * WIDTH * 4
    if zero == 3:
        assert seconds(1) == pytest.approx(sent * 7 / 8 / free.outside_bytes_per_second)
        return
    assert seconds(1) == pytest.approx(sent * 7 / 8 / free.inside_bytes_per_second)
    # Four of eight are on the node, beside the other tensor-parallel rank of each.
    assert seconds(2) == pytest.approx(sent * 4 / 8 / free.outside_bytes_per_second)


def test_products_of_experts_are_tiles_of_rows_and_all_experts_are_read() -> None:
    """By hand, of forward and backward: many rows of an expert take flops, few its bytes."""
    slow = replace(H100, memory_bytes_per_second=1e6, memory_efficiency=1.0)
    fast = replace(H100, memory_bytes_per_second=1e30)
    plan = ParallelPlan(data_parallel=DataParallel(size=8), expert_parallel=ExpertParallel(size=4))

    def seconds(cluster: Cluster) -> float:
        return predict(Mixture(), plan, cluster, example_batch=BATCH).breakdown.matrix_products

    dense = 4 * (WIDTH + 1) * (WIDTH + 4 * EXPERTS)
    read = 3 * (dense + 4 * 4 * EXPERTS / 4 * WIDTH**2)
    assert seconds(slow) == pytest.approx(read / slow.memory_bytes_per_second)
    tokens = len(BATCH) * LENGTH
    of_expert = tokens * CHOSEN / EXPERTS * 4
    padded = tokens * CHOSEN * (1 + 64 / of_expert)
    sides = {WIDTH: WIDTH**2, EXPERTS: 4 * EXPERTS * WIDTH}
    peak = fast.flops_per_second_of(4) * fast.efficiency

    def products(rows: float, numel: float, width: float) -> float:
        return 3 * 2 * rows * numel / (peak * width / (width + fast.half_width))

    expected = products(tokens, sides[WIDTH], WIDTH) + products(tokens, sides[EXPERTS], EXPERTS)
    assert seconds(fast) == pytest.approx(expected + 4 * products(padded, WIDTH**2, WIDTH))


def test_attention_of_blocks_with_experts_is_told_from_their_products() -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    ids = torch.zeros(3, 16, dtype=torch.long)
    found = workload_of(MixtralForCausalLM(config), {"input_ids": ids, "labels": ids})
    for part in found.blocks:
        assert part.expert_flops == 2 * 16 * 2 * 3 * 32 * 48
        assert part.attention_flops == 2 * 2 * 16 * 16 * 32
        assert part.rows_of_expert == 16 * 2 / 4
        # Gates are 96 x 32, the others 32 x 48: tensor parallelism cuts 96 and 48.
        assert part.expert_width(1) == 32
        assert part.expert_width(2) == pytest.approx((2 * 32 + 24) / 3)


@pytest.mark.parametrize(("zero", "size"), [(0, 4), (1, 2), (1, 8)])
def test_experts_are_summed_over_the_ranks_that_have_them(zero: Stage, size: int) -> None:
    """By hand, of eight ranks of a node, in the backend's order; nothing is hidden."""
    free = replace(H100, intra_latency_seconds=0.0, inter_latency_seconds=0.0)
    plan = ParallelPlan(
        data_parallel=DataParallel(size=8, zero_stage=zero, reduction="library"),
        expert_parallel=ExpertParallel(size=size),
    )
    found = predict(Mixture(), plan, free, example_batch=BATCH).breakdown.data_parallel
    dense, experts = 4 * (WIDTH + 1) * (WIDTH + 4 * EXPERTS), 4 * 4 * EXPERTS * WIDTH**2 / size
    others = 8 // size
    if zero:  # gathered and scattered once, then summed over the copies
        sent = 2 * (others - 1) / others * (dense + experts)
        sent += 2 * (size - 1) / size * dense / others
    else:
        sent = 2 * (size - 1) / size * dense
        sent += 2 * (others - 1) / others * (dense + experts)
    assert found == pytest.approx(sent / free.inside_bytes_per_second)


def test_candidates_that_share_experts_are_priced_at_once_as_alone() -> None:
    search = _prepared(Mixture(), {TP: 1}, H100, 2, BATCH)
    result = search.run(64)
    every = [*result.fits, *result.too_large]
    assert {each.candidate.layout.ep for each in every} == {1, 2, 4, 8}
    assert len({each.candidate for each in every}) == len(every)
    for each in every[:: len(every) // 100 + 1]:
        alone = search.score(each.candidate)
        assert (each.step_seconds, each.needed_bytes) == (alone.step_seconds, alone.needed_bytes)
        assert each.cost.step == each.step_seconds


def test_plans_are_refused_as_the_runtime_refuses_them() -> None:
    plan = ParallelPlan(data_parallel=DataParallel(size=3), expert_parallel=ExpertParallel(size=3))
    with pytest.raises(
        ValueError, match=r"3 does not divide the 8 experts of 'blocks\.0\.experts'"
    ):
        predict(Mixture(), plan, H100, example_batch=BATCH)
    with pytest.raises(ValueError, match="found no experts in Linear"):
        predict(nn.Linear(4, 4), plan, H100)


class Quantizer(nn.Module):
    """Codebooks, stacked, whose forward takes a mask and a temperature if somebody has them."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, 16, WIDTH // 4))  # (books, codes, features)

    def forward(self, x: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
        parts = x.unflatten(-1, (4, -1))
        scores = torch.einsum("bskd,kcd->bskc", parts, self.codes) / temperature
        chosen = scores.softmax(-1) if mask is None else (scores + mask).softmax(-1)
        return torch.einsum("bskc,kcd->bskd", chosen, self.codes).flatten(-2)


class Quantized(Mixture):
    """With a codebook between the blocks, of which every one has experts or none has."""

    def __init__(self, *, has_experts: bool) -> None:
        super().__init__()
        self.quantizer = Quantizer()
        if not has_experts:
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.quantizer(x))


@pytest.mark.parametrize("example", [True, False])
def test_codebooks_are_no_experts(example: bool) -> None:
    given = {"data_parallel.size": 2}
    batch = BATCH if example else None
    model = Quantized(has_experts=False)
    plan = generate_plan(model, given, world_size=2, cluster=H100, example_batch=batch)
    assert plan.expert_parallel.size == 1
    assert planned_experts(ParallelPlan(), model).stacked == ()
    with pytest.raises(ValueError, match=r"found no experts in Quantized.*'quantizer' stacks"):
        generate_plan(model, {**given, EP: 2}, world_size=2, cluster=H100, example_batch=batch)
    mixture = Quantized(has_experts=True)
    plan = generate_plan(
        mixture, {**given, EP: 2}, world_size=2, cluster=H100, example_batch=batch
    )
    assert [each.fqn for each in planned_experts(plan, mixture).stacked] == [
        f"blocks.{index}.experts" for index in range(4)
    ]


def large(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.slow
def test_mixtral_on_64_gpus_shares_its_experts() -> None:
    from transformers import MixtralConfig

    model = large(MixtralConfig())
    given = {TP: 1, "pipeline_parallel.size": 1}
    plan = generate_plan(model, given, world_size=64, cluster=H100)
    assert plan.expert_parallel.size == 8
    assert planned_experts(plan, model).stacked
    without = generate_plan(model, {**given, EP: 1}, world_size=64, cluster=H100)
    assert plan.estimate is not None
    assert without.estimate is not None
    assert plan.estimate.step_seconds < 0.8 * without.estimate.step_seconds


@pytest.mark.nightly
def test_deepseek_v3_shares_its_experts_where_it_fits() -> None:
    """Its state takes 8 bytes an element, 84 GB of each of 64 GPUs: more than they have."""
    from transformers import DeepseekV3Config

    model = large(DeepseekV3Config())
    nbytes = 8 * sum(p.numel() for p in model.parameters())
    assert nbytes / 64 > H100.memory_bytes - H100.reserved_bytes
    with pytest.raises(ValueError, match=r"the smallest .* too much"):
        generate_plan(model, {TP: 1}, world_size=64, cluster=H100)
    plan = generate_plan(model, {TP: 1}, world_size=256, cluster=H100)
    assert plan.expert_parallel.size > 1
    with pytest.raises(ValueError, match=r"no plan|the smallest"):
        generate_plan(model, {TP: 1, EP: 1}, world_size=256, cluster=H100)
