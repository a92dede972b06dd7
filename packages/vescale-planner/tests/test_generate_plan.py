from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from vescale_parallel import ParallelPlan, constraint_keys, model_signature
from vescale_planner import Cluster, generate_plan, predict

CPU = Cluster.preset("cpu")
H200 = Cluster.preset("h200")


def _llama(**changes: Any) -> nn.Module:
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def _llama_70b() -> nn.Module:
    return _llama(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ).bfloat16()


def _batch(rows: int = 8, tokens: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _value(plan: ParallelPlan, key: str) -> Any:
    value: Any = plan
    for name in constraint_keys()[key]:
        value = getattr(value, name)
    return value


def test_a_plan_explains_itself() -> None:
    plan = generate_plan(_llama(), world_size=4, cluster=CPU, example_batch=_batch())
    said = " ".join(plan.explain().split())
    assert "the batch is split over 4 data-parallel replicas" in said
    assert all(" ".join(reason.split()) in said for reason in plan.reasons)


def test_a_tiny_model_on_four_ranks_is_data_parallel() -> None:
    plan = generate_plan(_llama(), world_size=4, cluster=CPU)
    assert plan.dotted() == {"data_parallel.size": 4}
    assert generate_plan(_llama(), world_size=4, cluster=CPU, example_batch=_batch()).dotted() == {
        "data_parallel.size": 4
    }


def test_one_rank_needs_no_plan() -> None:
    assert generate_plan(_llama(), world_size=1, cluster=CPU).dotted() == {}


def test_the_world_size_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert generate_plan(_llama(), cluster=CPU).world_size == 2


def test_the_machine_itself_is_a_cluster() -> None:
    assert generate_plan(_llama(), world_size=4).world_size == 4


def test_the_same_arguments_give_the_same_plan() -> None:
    plans = [
        generate_plan(_llama(), world_size=8, cluster=H200, example_batch=_batch())
        for _ in range(2)
    ]
    assert plans[0] == plans[1]
    assert ParallelPlan.from_json(plans[0].to_json()) == plans[0]


def test_the_plan_knows_its_model_and_says_why() -> None:
    model = _llama()
    plan = generate_plan(model, world_size=4, cluster=CPU)
    assert plan.model == model_signature(model)
    assert plan.estimate is not None
    assert plan.estimate.step_seconds > 0
    assert 0 < plan.estimate.memory_bytes < CPU.memory_bytes
    text = "\n".join(plan.reasons)
    assert "next: " in text
    assert "x the time" in text
    assert "no example_batch" in text


def test_an_observation_says_what_runs_around_the_blocks() -> None:
    plan = generate_plan(_llama(), world_size=4, cluster=CPU, example_batch=_batch())
    assert any("model.norm, lm_head behind them" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    "constraints",
    [
        {"tensor_parallel.size": 2},
        {"tensor_parallel.size": 4, "tensor_parallel.sharding_policy": "huggingface"},
        {"tensor_parallel.size": 2, "tensor_parallel.sharding_policy": "megatron"},
        {"pipeline_parallel.size": 4, "pipeline_parallel.schedule": "gpipe"},
        {"pipeline_parallel.size": 2, "tensor_parallel.size": 2},
        {"pipeline_parallel.schedule": "interleaved_1f1b"},
        {"pipeline_parallel.schedule": "zbv"},
        {"pipeline_parallel.size": 2, "pipeline_parallel.virtual_stages": 2},
        {"pipeline_parallel.size": 2, "pipeline_parallel.microbatches": 4},
        {"pipeline_parallel.microbatches": 8, "batch.global_size": 16},
        {"pipeline_parallel.split_points": ("model.layers.1",)},
        {"pipeline_parallel.size": 2, "pipeline_parallel.split_method": "parameters"},
        {"pipeline_parallel.size": 1, "tensor_parallel.size": 1},
        {"data_parallel.size": 2},
        {"data_parallel.zero_stage": 3},
        {"data_parallel.zero_stage": 0, "data_parallel.size": 4},
        {"data_parallel.replicate_size": 2, "data_parallel.size": 4},
        {"data_parallel.replicate_size": 2, "batch.global_size": 8},
        {
            "data_parallel.replicate_size": 2,
            "data_parallel.zero_stage": 3,
            "data_parallel.replicate_zero_stage": 1,
        },
        {"recompute": "full", "precision.param": "bfloat16", "batch.shuffle": True},
        {
            "tensor_parallel.sharding_plan": {
                "model.layers.*.mlp.up_proj.weight": "Shard(0)",
                "model.layers.*.mlp.down_proj.weight": "Shard(1)",
            }
        },
    ],
)
@pytest.mark.parametrize("observed", [False, True])
def test_every_constraint_is_obeyed_exactly(constraints: dict[str, Any], observed: bool) -> None:
    batch = _batch() if observed else None
    plan = generate_plan(_llama(), constraints, world_size=4, cluster=CPU, example_batch=batch)
    assert plan.world_size == 4
    for key, value in constraints.items():
        assert _value(plan, key) == value


def test_tensor_parallel_plans_carry_the_placements() -> None:
    plan = generate_plan(_llama(), {"tensor_parallel.size": 2}, world_size=2, cluster=CPU)
    sharding = plan.tensor_parallel.sharding_plan
    assert sharding["model.layers.*.self_attn.q_proj.weight"] == "Shard(0)"


def test_hybrid_sharding_shards_if_it_is_asked_for() -> None:
    plan = generate_plan(_llama(), {"data_parallel.replicate_size": 2}, world_size=8, cluster=H200)
    assert plan.data_parallel.zero_stage > 0


def test_stages_are_cut_by_what_the_split_method_counts() -> None:
    # The output layer is as heavy as several blocks, and counts for "flops" alone here.
    model = _llama(vocab_size=2048, num_hidden_layers=6)

    def points(method: str) -> tuple[str, ...]:
        said = {"size": 2, "microbatches": 1, "split_method": method}
        constraints = {f"pipeline_parallel.{key}": value for key, value in said.items()}
        return generate_plan(
            model, constraints, world_size=2, cluster=CPU, example_batch=_batch()
        ).pipeline_parallel.split_points

    assert points("uniform") == ("model.layers.3",)
    assert points("parameters") == ("model.layers.3",)
    assert points("flops") == ("model.layers.5",)
    # The embedding, its gradient and the logits of both ends.
    assert points("memory") == ("model.layers.4",)
    assert points("auto") == ("model.layers.5",)


def test_splitting_by_flops_without_a_batch_says_that_they_are_estimated() -> None:
    constraints = {"pipeline_parallel.size": 2, "pipeline_parallel.split_method": "flops"}
    plan = generate_plan(_llama(), constraints, world_size=2, cluster=CPU)
    assert any("balanced by estimated flops" in reason for reason in plan.reasons)


def test_a_batch_that_cannot_be_observed_is_said_and_estimated() -> None:
    class Peeks(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input if bool(super().forward(input).sum() > 0) else -input

    plan = generate_plan(Peeks(4, 4), world_size=2, cluster=CPU, example_batch=torch.ones(2, 4))
    assert any("could not be run without memory" in reason for reason in plan.reasons)


def test_a_model_that_barely_fits_is_sharded() -> None:
    # 8B parameters of 2 bytes with AdamW take 64 GB, more than half of an 80 GB device
    # with activations; 14B take 112 GB and cannot stay whole.
    small = _llama(hidden_size=4096, intermediate_size=14336, num_hidden_layers=60).bfloat16()
    plan = generate_plan(
        small, world_size=8, cluster=Cluster.preset("a100"), example_batch=_batch(1, 2048)
    )
    sharding = plan.data_parallel.zero_stage > 0, plan.tensor_parallel.size > 1
    assert any((*sharding, plan.pipeline_parallel.size > 1))
    assert plan.estimate is not None
    assert plan.estimate.memory_bytes <= Cluster.preset("a100").memory_bytes
    assert any("fragmentation" in reason for reason in plan.reasons)


def test_zero_alone_is_used_where_nothing_else_is_allowed() -> None:
    model = _llama(hidden_size=4096, intermediate_size=14336, num_hidden_layers=60).bfloat16()
    only_data = {"tensor_parallel.size": 1, "pipeline_parallel.size": 1}
    plan = generate_plan(model, only_data, world_size=8, cluster=Cluster.preset("a100"))
    assert plan.data_parallel.zero_stage > 0


def test_seventy_billion_parameters_fit_on_64_gpus() -> None:
    plan = generate_plan(_llama_70b(), world_size=64, cluster=H200, example_batch=_batch(1, 8192))
    assert plan.world_size == 64
    assert plan.estimate is not None
    assert plan.estimate.memory_bytes <= H200.memory_bytes


@pytest.mark.slow
def test_seventy_billion_parameters_train_on_a_large_batch_in_micro_batches() -> None:
    constraints = {"batch.global_size": 1024, "precision.param": "bfloat16"}
    plan = generate_plan(_llama_70b(), constraints, world_size=64, cluster="h100")
    estimate = plan.estimate
    assert estimate is not None
    assert estimate.memory_bytes <= Cluster.preset("h100").memory_bytes
    # 202 GiB without: forward and backward have few rows at once.
    rows = 1024 // plan.data_parallel.size
    assert plan.batch.gradient_accumulation > 1
    assert rows % plan.batch.gradient_accumulation == 0
    # Pipelines, whose micro-batches would fit, cannot be looked at without an example.
    assert any("nothing fits with all rows at once" in reason for reason in plan.reasons)


def test_a_batch_that_not_all_ranks_can_share_leaves_other_axes() -> None:
    plan = generate_plan(_llama(), {"batch.global_size": 2}, world_size=4, cluster=CPU)
    assert plan.data_parallel.size <= 2
    assert plan.world_size == 4


def test_tied_weights_count_on_both_ends_of_a_pipeline() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=4096, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        )
    constraints = {"pipeline_parallel.size": 2, "pipeline_parallel.split_method": "flops"}
    plan = generate_plan(model, constraints, world_size=2, cluster=CPU, example_batch=_batch())
    # The fullest rank holds half of the blocks and the whole table of 4096 x 64.
    assert plan.estimate is not None
    assert plan.estimate.memory_bytes > CPU.reserved_bytes + 4 * 4 * 4096 * 64


@pytest.mark.parametrize(
    ("constraints", "world_size", "message"),
    [
        ({"tensor_parallel.sise": 2}, 4, r"did you mean 'tensor_parallel\.size'"),
        (
            {"tensor_parallel.size": 2, "data_parallel.size": 3},
            4,
            r"multiple of 6 \(tensor_parallel\.size 2 x data_parallel\.size 3\), got 4.* 6$",
        ),
        (
            {
                "tensor_parallel.size": 2,
                "data_parallel.size": 2,
                "pipeline_parallel.size": 2,
            },
            4,
            r"expected world size 8 .*, got 4; start 8 ranks",
        ),
        ({"pipeline_parallel.size": 8}, 8, r"at most 4 pipeline stages, one per block, got 8"),
        (
            {"batch.global_size": 6, "data_parallel.size": 4},
            4,
            r"batch\.global_size to be a multiple.*got 6",
        ),
        (
            {"batch.global_size": 6, "pipeline_parallel.microbatches": 4},
            4,
            r"batch\.global_size to be a multiple.*got 6",
        ),
        ({"context_parallel.size": 3}, 4, r"a multiple of 3 \(context_parallel\.size 3\), got 4"),
        ({"context_parallel.size": 0}, 4, r"context_parallel\.size to be a positive integer"),
        ({"expert_parallel.size": 2}, 4, r"size 2: found no experts in LlamaForCausalLM"),
        (
            {"expert_parallel.size": 3},
            4,
            r"expert_parallel\.size 3 does not divide data_parallel\.size",
        ),
        ({"compile": True}, 4, r"expected compile to be 'none' or 'blocks', got True"),
        ({"tensor_parallel.size": "2"}, 4, r"tensor_parallel\.size to be a positive integer"),
        ({"pipeline_parallel.size": 0}, 4, r"pipeline_parallel\.size to be a positive integer"),
        ({"pipeline_parallel.schedule": "zigzag"}, 4, r"schedule to be one of .* got 'zigzag'"),
        (
            {"pipeline_parallel.split_method": "manual"},
            4,
            r"needs pipeline_parallel\.split_po",
        ),
        (
            {"pipeline_parallel.split_points": ("model.layers.9",)},
            4,
            r"'model\.layers\.9' is no block of LlamaForCausalLM",
        ),
        (
            {"pipeline_parallel.split_points": ("model.layers.1",), "pipeline_parallel.size": 4},
            4,
            r"1 pipeline_parallel\.split_points make 2 stages",
        ),
        (
            {"tensor_parallel.sharding_plan": {"layers.*.up": "Shard(0)"}},
            4,
            r"'layers\.\*\.up' matches nothing in the model",
        ),
        (
            {"tensor_parallel.size": 2, "tensor_parallel.sharding_policy": "fsdp-only"},
            4,
            r"'fsdp-only' shards nothing",
        ),
        ({"data_parallel.replicate_size": 3}, 4, r"replicate_size 3 does not divide"),
        (
            {"pipeline_parallel.size": 1, "pipeline_parallel.schedule": "interleaved_1f1b"},
            4,
            r"'interleaved_1f1b' needs pipeline_parallel\.size above 1",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_the_reason(
    constraints: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate_plan(_llama(), constraints, world_size=world_size, cluster=CPU)


def test_heads_that_do_not_divide_stay_whole_with_the_reason() -> None:
    plan = generate_plan(_llama(), {"tensor_parallel.size": 8}, world_size=8, cluster=CPU)
    cut = plan.tensor_parallel.sharding_plan
    assert "model.layers.*.mlp.up_proj.weight" in cut
    assert not any("self_attn" in pattern for pattern in cut)
    assert any("length 4 is not divisible by 8" in reason for reason in plan.reasons)


def test_a_model_without_blocks_has_no_pipeline() -> None:
    with pytest.raises(ValueError, match=r"splits between the blocks"):
        generate_plan(nn.Linear(4, 4), {"pipeline_parallel.size": 2}, world_size=2, cluster=CPU)


def test_what_does_not_fit_says_by_how_much_and_what_would_help() -> None:
    with pytest.raises(ValueError, match=r"GiB too much: .* would fit: 8 times the ranks"):
        generate_plan(_llama_70b(), world_size=1, cluster=H200)


def test_a_cut_sequence_is_named_where_it_would_fit() -> None:
    only: dict[str, Any] = {
        "tensor_parallel.size": 2,
        "recompute": "none",
        "batch.global_size": 8,
        "batch.gradient_accumulation": 1,
    }
    needed: list[int] = []
    for sequence in (False, True):
        constraints = {**only, "tensor_parallel.sequence": sequence}
        plan = generate_plan(_llama(), constraints, world_size=2, cluster=CPU)
        assert plan.estimate is not None
        needed.append(plan.estimate.memory_bytes)
    between = replace(CPU, memory_bytes=sum(needed) // 2)
    with pytest.raises(ValueError, match=r"would fit: .*tensor_parallel\.sequence True"):
        generate_plan(_llama(), only, world_size=2, cluster=between)
    only["tensor_parallel.sequence"] = True
    assert generate_plan(_llama(), only, world_size=2, cluster=between).tensor_parallel.sequence


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'adamw'.*got 'sophia'"):
        generate_plan(_llama(), world_size=2, cluster=CPU, optimizer="sophia")


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="positive integer, got 0"):
        generate_plan(_llama(), world_size=0, cluster=CPU)


def _needed(constraints: dict[str, Any]) -> int:
    plan = generate_plan(_llama(), constraints, world_size=2, cluster=CPU)
    assert plan.estimate is not None
    return plan.estimate.memory_bytes


def test_micro_batches_are_proposed_where_the_batch_does_not_fit_otherwise() -> None:
    only = {
        "data_parallel.size": 2, "recompute": "none", "data_parallel.zero_stage": 1,
        "batch.global_size": 256,
    }  # fmt: skip
    key = "batch.gradient_accumulation"
    needed = [_needed({**only, key: count}) for count in (1, 4, 64)]
    assert needed == sorted(needed, reverse=True)
    cluster = replace(CPU, memory_bytes=needed[1])
    assert generate_plan(_llama(), only, world_size=2, cluster=CPU).dotted().get(key) is None
    plan = generate_plan(_llama(), only, world_size=2, cluster=cluster)
    assert plan.batch.gradient_accumulation == 4
    assert plan.estimate is not None
    assert plan.estimate.memory_bytes == needed[1]
    assert any("nothing fits with all rows at once" in reason for reason in plan.reasons)
    with pytest.raises(ValueError, match=r"[GM]iB too much"):
        generate_plan(_llama(), {**only, key: 2}, world_size=2, cluster=cluster)


@pytest.mark.parametrize(
    ("prefetch", "zero_stage", "reason"),
    [
        (0, 3, "one block is whole at a time, and compute waits"),
        (2, 3, "of 3 blocks are whole at the same time"),
        (2, 1, "no effect"),
    ],
)
def test_blocks_gathered_ahead_are_planned_and_explained(
    prefetch: int, zero_stage: int, reason: str
) -> None:
    said = {"data_parallel.prefetch": prefetch, "data_parallel.zero_stage": zero_stage}
    plan = generate_plan(_llama(), said, world_size=4, cluster=H200)
    assert plan.data_parallel.prefetch == prefetch
    assert any("data_parallel.prefetch" in why and reason in why for why in plan.reasons)


@pytest.mark.parametrize(
    ("said", "reason"),
    [(False, "gathered once a step"), ({"model.layers.0": False}, "assumed: blocks are freed")],
)
def test_blocks_that_stay_gathered_are_planned_and_explained(said: Any, reason: str) -> None:
    constraints = {
        "data_parallel.reshard_after_forward": said,
        "data_parallel.zero_stage": 3,
        "data_parallel.size": 4,
    }
    plan = generate_plan(_llama(), constraints, world_size=4, cluster=H200)
    assert plan.data_parallel.reshard_after_forward == said
    assert any(reason in why for why in plan.reasons)


def test_offload_is_not_searched_but_counted_in_memory_and_explained() -> None:
    said: dict[str, Any] = {"data_parallel.offload": "parameters", "data_parallel.zero_stage": 3}
    plan = generate_plan(_llama(), said, world_size=4, cluster=H200)
    assert plan.data_parallel.offload == "parameters"
    assert any("memory on the host is not counted" in why for why in plan.reasons)
    assert any("optimizer is timed as if" in why for why in predict(_llama(), plan).assumptions)
    others = generate_plan(_llama(), world_size=4, cluster=H200)
    assert others.data_parallel.offload == "none"


def test_sums_by_the_backend_are_planned_and_explained() -> None:
    said = {"data_parallel.reduction": "library"}
    plan = generate_plan(_llama(), said, world_size=4, cluster=H200)
    assert plan.data_parallel.reduction == "library"
    assert any("not to the bits of one device" in why for why in plan.reasons)


def test_a_count_of_micro_batches_that_does_not_divide_the_batch_is_refused() -> None:
    constraints = {"batch.global_size": 6, "batch.gradient_accumulation": 4}
    with pytest.raises(ValueError, match=r"batch\.gradient_accumulation"):
        generate_plan(_llama(), constraints, world_size=2, cluster=CPU)


class _WithoutElements(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.zeros(0, 4))
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(torch.cat([x, self.slots])).relu()).square().mean()


@pytest.mark.parametrize("example", [None, torch.zeros(2, 4)], ids=["no example", "example"])
def test_parameters_without_elements_are_planned(example: torch.Tensor | None) -> None:
    plan = generate_plan(_WithoutElements(), world_size=2, cluster="cpu", example_batch=example)
    assert plan.world_size == 2


class _Scaled(nn.Module):
    """A layer whose only parameter is a number, as a learned temperature or residual gate is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_layer_may_have_nothing_but_a_number() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Scaled())
    plan = generate_plan(model, world_size=2, cluster=CPU, example_batch=torch.zeros(4, 8))
    assert plan.data_parallel.size == 2


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"a lazy one, '0\.weight' .*run the model once"):
        generate_plan(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), world_size=2)
