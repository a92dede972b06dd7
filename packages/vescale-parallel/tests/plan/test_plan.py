"""The plan as data: constraints in, JSON and text out, nonsense refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from vescale_parallel import (
    DataParallel,
    Estimate,
    ParallelPlan,
    PipelineParallel,
    check_constraints,
    constraint_keys,
    model_signature,
    with_constraints,
)

CONSTRAINTS: dict[str, Any] = {
    "tensor_parallel.size": 2,
    "tensor_parallel.sharding_plan": {"layers.*.up.weight": "Shard(0)"},
    "pipeline_parallel.size": 2,
    "pipeline_parallel.microbatches": 4,
    "pipeline_parallel.split_points": ["layers.3"],
    "data_parallel.size": 4,
    "data_parallel.replicate_size": 2,
    "data_parallel.zero_stage": 3,
    "batch.global_size": 32,
    "batch.shuffle": True,
    "precision.param": "bfloat16",
    "recompute": "full",
}


def full_plan() -> ParallelPlan:
    plan = with_constraints(ParallelPlan(), CONSTRAINTS)
    return replace(
        plan,
        model=model_signature(nn.Linear(2, 3)),
        estimate=Estimate(step_seconds=0.5, memory_bytes=2**30),
        reasons=("the fastest",),
    )


def test_a_plan_survives_json() -> None:
    plan = full_plan()
    assert ParallelPlan.from_json(plan.to_json()) == plan


def test_json_written_by_hand_may_leave_fields_out() -> None:
    plan = ParallelPlan.from_json('{"data_parallel": {"size": 2, "zero_stage": 1}}')
    assert plan == ParallelPlan(data_parallel=DataParallel(size=2, zero_stage=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "expected a plan as JSON"),
        ("[1]", "expected a plan as a JSON object"),
        ('{"format": 99}', "expected plan format 1, got 99"),
        ('{"tensor_parallel": {"sise": 2}}', "unknown plan field 'tensor_parallel.sise'"),
        ('{"tensor_parallel": 2}', "plan field 'tensor_parallel' to be an object"),
        ('{"data_parallel": {"zero_stage": 4}}', r"zero_stage to be one of \[0, 1, 2, 3\], got 4"),
    ],
)
def test_json_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelPlan.from_json(text)


def test_print_shows_what_differs_in_the_form_of_constraints() -> None:
    text = str(full_plan())
    assert 'tensor_parallel.sharding_plan: {"layers.*.up.weight": "Shard(0)"}' in text
    assert 'pipeline_parallel.split_points: ["layers.3"]' in text
    assert "data_parallel.zero_stage: 3" in text
    assert "plan for 16 ranks, Linear (2 parameters, 9 elements)" in text
    assert "0.5 s a step, 1 GiB a rank" in text
    assert "- the fastest" in text
    assert "compile" not in text


def test_print_says_in_words_what_is_sharded_and_what_is_split() -> None:
    text = " ".join(str(full_plan()).split())
    assert "the batch is split over 4 data-parallel replicas" in text
    assert "optimizer state are sharded over 2 ranks (ZeRO 3, as FSDP does)" in text
    assert "2 copies of that (hybrid sharding)" in text
    assert "each layer is sharded over 2 tensor-parallel ranks" in text
    assert "2 pipeline stages on 2 ranks, each batch into 4 micro-batches (1f1b)" in text
    assert "activation checkpointing" in text
    assert "a single device: nothing is sharded" in str(ParallelPlan())


def test_explain_says_what_a_plan_does_and_why_also_after_json() -> None:
    for plan in (full_plan(), ParallelPlan.from_json(full_plan().to_json())):
        assert plan.explain().splitlines() == [
            "plan for 16 ranks, Linear (2 parameters, 9 elements)",
            *(
                line
                for line in str(plan).splitlines()
                if line.startswith("  ") and ":" not in line
            ),
            "predicted: 0.5 s a step, 1 GiB a rank",
            "- the fastest",
        ]
    assert "gives no reasons" in ParallelPlan().explain()


def test_printed_lines_fit_a_terminal() -> None:
    plan = replace(
        full_plan(),
        estimate=Estimate(
            step_seconds=0.5,
            memory_bytes=2**30,
            samples=32,
            tokens=65536,
            flops=1e15,
            peak_flops_per_second=1e15,
            is_assumed=True,
        ),
        reasons=("a reason " * 50,),
        pipeline_parallel=PipelineParallel(
            size=20, split_points=tuple(f"model.layers.{i}" for i in range(1, 20))
        ),
    )
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("131,000 tokens/s, MFU 1.2%" in line for line in lines)
    assert any("64 samples/s" in line for line in lines)


def test_every_constraint_key_is_a_field_and_every_field_a_key() -> None:
    record = json.loads(ParallelPlan().to_json())
    fields = {
        f"{section}.{name}" if isinstance(value, dict) else section
        for section, value in record.items()
        for name in (value if isinstance(value, dict) else [""])
    }
    assert set(constraint_keys()) == fields - {"format", "model", "estimate", "reasons"}


def test_the_world_is_the_product_of_the_axes() -> None:
    plan = full_plan()
    assert plan.axes == {"pp": 2, "dp_replicate": 2, "ep": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    plan.check_world_size(16)
    with pytest.raises(ValueError, match=r"expected 16 ranks \(pp 2 x dp_replicate 2 x .* size 8"):
        plan.check_world_size(8)


def test_without_zero_everything_is_replicated() -> None:
    assert ParallelPlan(data_parallel=DataParallel(size=4)).axes["dp_replicate"] == 4


def test_given_sharding_plans_and_split_points_are_manual() -> None:
    plan = with_constraints(ParallelPlan(), CONSTRAINTS)
    assert plan.tensor_parallel.sharding_policy == "manual"
    assert plan.pipeline_parallel.split_method == "manual"


def test_an_unknown_constraint_names_the_near_ones() -> None:
    with pytest.raises(ValueError, match=r"'tensor_paralel.size'; did you mean 'tensor_para"):
        check_constraints({"tensor_paralel.size": 2})


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"tensor_parallel.size": 0}, "positive integer, got 0"),
        ({"tensor_parallel.size": True}, "positive integer, got True"),
        ({"tensor_parallel.sequence": 1}, "True or False, got 1"),
        ({"tensor_parallel.sharding_policy": "best"}, "one of .*'megatron'.* got 'best'"),
        ({"data_parallel.size": 3, "data_parallel.replicate_size": 2}, "divide .* got 2"),
        ({"pipeline_parallel.schedule": "2f2b"}, "one of .*'1f1b'.* got '2f2b'"),
        ({"pipeline_parallel.microbatches": 2}, "needs pipeline_parallel.size > 1"),
        (
            {"pipeline_parallel.size": 2, "pipeline_parallel.virtual_stages": 2},
            "exactly with schedule 'interleaved_1f1b'",
        ),
        (
            {
                "pipeline_parallel.size": 2,
                "pipeline_parallel.virtual_stages": 2,
                "pipeline_parallel.schedule": "interleaved_1f1b",
                "pipeline_parallel.microbatches": 3,
            },
            "a multiple of pipeline_parallel.size",
        ),
        ({"batch.global_size": 6, "data_parallel.size": 4}, "nearest sizes are 4 and 8"),
        ({"precision.param": "fp8"}, "one of .*'bfloat16'.* got 'fp8'"),
        ({"recompute": "some"}, "one of .*'full'.* got 'some'"),
        ({"compile": "yes"}, "one of .*'blocks'.* got 'yes'"),
        ({"tensor_parallel.sequence": "yes"}, "True or False, got 'yes'"),
    ],
)
def test_values_that_mean_nothing_are_refused(
    constraints: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with_constraints(ParallelPlan(), constraints)


def test_a_plan_cannot_be_changed() -> None:
    plan = full_plan()
    with pytest.raises(AttributeError):
        plan.recompute = "none"  # pyright: ignore[reportAttributeAccessIssue]: the point
    with pytest.raises(TypeError):
        plan.tensor_parallel.sharding_plan["x"] = "Shard(0)"  # pyright: ignore[reportIndexIssue]: the point


def test_signatures_tell_models_apart_by_names_shapes_and_dtypes() -> None:
    same = model_signature(nn.Linear(2, 3))
    assert same == model_signature(nn.Linear(2, 3))
    others = [nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3, dtype=torch.float64)]
    assert all(model_signature(other) != same for other in others)


def test_pipelines_count_stages_over_ranks() -> None:
    section = PipelineParallel(
        size=2, virtual_stages=3, schedule="interleaved_1f1b", microbatches=4
    )
    assert section.num_stages == 6


@pytest.mark.parametrize("loss", [True, "", 1.5])
def test_a_loss_is_a_name_or_a_place(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel\.loss to be the name of an output"):
        PipelineParallel(loss=loss)


@pytest.mark.parametrize("loss", ["ce", 1, None])
def test_what_a_pipeline_returns_is_kept_in_json(loss: str | int | None) -> None:
    plan = ParallelPlan(pipeline_parallel=PipelineParallel(loss=loss, outputs="last"))
    assert ParallelPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"pipeline_parallel.size": 2}, "expected data_parallel.zero_stage 2 or 3, got 0, where"),
        ({"data_parallel.zero_stage": 2}, "'step' without a pipeline, got 'microbatch'; batch.gr"),
    ],
)
def test_reducing_micro_batches_needs_a_pipeline_and_sharded_gradients(
    constraints: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with_constraints(
            ParallelPlan(), {"pipeline_parallel.reduce_every": "microbatch", **constraints}
        )
