"""Stages of equal weight: by blocks, parameters, flops, memory or time, from one function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from vescale_parallel import ParallelPlan, PipelineParallel, check_pipeline, with_constraints
from vescale_parallel._pipeline.cuts.observed_split import with_split_points
from vescale_parallel._pipeline.cuts.partition import lightest_split, split_blocks, stage_starts
from vescale_parallel._pipeline.cuts.stage_costs import PartCost, StageRule, balanced_starts
from vescale_parallel._pipeline.schedules.actions import passes_in_flight
from vescale_parallel._pipeline.schedules.simulator import simulate_schedule
from vescale_parallel._pipeline.stage_assignment import places_outside

NOTHING = PartCost()


def rule(method: Any, size: int = 2, **kwargs: Any) -> StageRule:
    names = {"schedule", "virtual_stages", "microbatches"} & {*kwargs}
    pipeline = {name: kwargs.pop(name) for name in names}
    kwargs.setdefault("microbatches", pipeline.get("microbatches", 1))
    return StageRule(PipelineParallel(size=size, split_method=method, **pipeline), **kwargs)


def flops(*values: float) -> list[PartCost]:
    return [PartCost(flops=value) for value in values]


@settings(max_examples=60)
@given(st.data())
def test_no_split_has_a_lighter_heaviest_stage(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 7))
    num_stages = data.draw(st.integers(1, num_blocks))
    row = st.lists(st.integers(0, 9), min_size=num_blocks, max_size=num_blocks)
    weights = data.draw(st.lists(row, min_size=num_stages, max_size=num_stages))
    extra = data.draw(st.lists(st.integers(0, 20), min_size=num_stages, max_size=num_stages))

    def heaviest(starts: Sequence[int]) -> int:
        ends = (*starts[1:], num_blocks)
        return max(
            more + sum(own[a:b])
            for own, more, a, b in zip(weights, extra, starts, ends, strict=True)
        )

    found = lightest_split(weights, extra)
    assert found == sorted({0, *found})
    assert len(found) == num_stages
    cuts = itertools.combinations(range(1, num_blocks), num_stages - 1)
    assert heaviest(found) == min(heaviest((0, *cut)) for cut in cuts)


def test_what_one_heavy_block_leaves_open_is_shared_out_evenly() -> None:
    assert split_blocks([10, 1, 1, 1, 1, 1, 1, 1, 1], 3) == [0, 1, 5]
    assert split_blocks([0, 0, 0, 0], 2) == [0, 2]


@pytest.mark.parametrize(
    ("method", "expected"),
    [("uniform", [0, 2]), ("parameters", [0, 1]), ("flops", [0, 3]), ("memory", [0, 1])],
)
def test_every_method_counts_its_own(method: str, expected: list[int]) -> None:
    blocks = [
        PartCost(numel=9, nbytes=36, flops=1, saved_bytes=1),
        *[PartCost(numel=1, nbytes=4, flops=1, saved_bytes=1)] * 2,
        PartCost(numel=1, nbytes=4, flops=9, saved_bytes=1),
    ]
    assert balanced_starts(NOTHING, blocks, NOTHING, rule(method)) == expected


def test_a_head_much_larger_than_a_block_has_the_last_stage_almost_to_itself() -> None:
    head = PartCost(flops=50)
    assert balanced_starts(NOTHING, flops(1, 1, 1, 1, 1, 1), head, rule("flops", 3)) == [0, 2, 5]
    stem = PartCost(flops=50)
    assert balanced_starts(stem, flops(1, 1, 1, 1, 1, 1), NOTHING, rule("flops", 3)) == [0, 1, 3]
    assert balanced_starts(stem, flops(1, 1, 1, 1, 1, 1), head, rule("uniform", 3)) == [0, 2, 4]


def test_virtual_stages_are_each_a_stage() -> None:
    looped = {"schedule": "interleaved_1f1b", "virtual_stages": 2, "microbatches": 2}
    head = PartCost(flops=2)
    found = balanced_starts(NOTHING, flops(*[1.0] * 10), head, rule("flops", 2, **looped))
    assert found == [0, 3, 6, 9]


def test_time_counts_the_loss_and_the_embedding_that_compute_no_products() -> None:
    # A loss of 400 bytes is written and read as long as 40000 flops of a block take.
    quick: dict[str, Any] = {"flops_per_byte": 100.0}
    blocks, loss = flops(*[40_000.0] * 5), PartCost(saved_bytes=400)
    assert balanced_starts(NOTHING, blocks, loss, rule("auto", **quick)) == [0, 3]
    assert balanced_starts(NOTHING, blocks, PartCost(), rule("auto", **quick)) == [0, 2]
    table = PartCost(nbytes=1200)
    assert balanced_starts(table, blocks, PartCost(), rule("auto", **quick)) == [0, 1]


def test_time_counts_that_blocks_run_again() -> None:
    # The head takes 6 of 12 forwards; of 4 passes each instead of 3 two blocks are 8, not 6.
    blocks, head = flops(1, 1, 1, 1, 1, 1), PartCost(flops=3.2)
    few: dict[str, Any] = {"flops_per_byte": 0.0}
    assert balanced_starts(NOTHING, blocks, head, rule("auto", **few)) == [0, 5]
    assert balanced_starts(NOTHING, blocks, head, rule("auto", recomputes=True, **few)) == [0, 4]


def test_memory_counts_what_a_schedule_keeps() -> None:
    blocks = [PartCost(saved_bytes=8, nbytes=1, output_bytes=1)] * 8
    # 1F1B: four micro-batches on the first of four stages, one on the last.
    few = rule("memory", 4, microbatches=8)
    starts = balanced_starts(NOTHING, blocks, NOTHING, few)
    counts = [b - a for a, b in itertools.pairwise([*starts, 8])]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    # Under gpipe all stages keep all of them.
    many = rule("memory", 4, microbatches=8, schedule="gpipe")
    assert balanced_starts(NOTHING, blocks, NOTHING, many) == [0, 2, 4, 6]
    # Blocks that run again keep their inputs alone: parameters are most of it.
    again = rule("memory", 4, microbatches=1, recomputes=True)
    assert balanced_starts(NOTHING, blocks, NOTHING, again) == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("name", "virtual", "microbatches"),
    [
        ("gpipe", 1, 8),
        ("1f1b", 1, 8),
        ("1f1b", 1, 2),
        ("interleaved_1f1b", 2, 8),
        ("looped_bfs", 2, 4),
        ("interleaved_zero_bubble", 2, 8),
        ("zbv", 2, 8),
        ("dualpipev", 2, 8),
    ],
)
def test_stages_keep_no_fewer_passes_than_the_simulator_counts(
    name: str, virtual: int, microbatches: int
) -> None:
    shape = {"size": 4, "virtual_stages": virtual, "microbatches": microbatches}
    if name == "dualpipev":
        shape |= {"size": 2}
    found = passes_in_flight(name, **shape)
    placement = PipelineParallel(schedule=name, **shape).placement  # pyright: ignore[reportArgumentType]: a name
    for rank, most in enumerate(simulate_schedule(name, **shape).peak_activations):
        stages = placement.stages_of(rank)
        assert max(found[stage] for stage in stages) <= most
        assert sum(found[stage] for stage in stages) >= most
        if virtual == 1:
            assert found[stages[0]] == most


class Model(nn.Module):
    """An embedding, five blocks, and a head much larger than a block."""

    def __init__(self, vocabulary: int = 4096) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).relu()
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def split(model: nn.Module, batch: Any, size: int = 2, **section: Any) -> tuple[str, ...]:
    given = {f"pipeline_parallel.{name}": value for name, value in section.items()}
    plan = with_constraints(ParallelPlan(), {"pipeline_parallel.size": size, **given})
    found = with_split_points(plan, model, batch, places_outside(plan, model))
    stage_starts(found, model, [f"blocks.{i}" for i in range(5)])
    return found.pipeline_parallel.split_points


IDS = torch.arange(32).view(2, 16)


def test_methods_see_a_real_model() -> None:
    assert split(Model(), None) == ()
    # The norm is behind the blocks.
    assert split(Model(), None, split_method="parameters") == ("blocks.3",)
    for method in ("flops", "memory", "auto"):
        assert split(Model(), IDS, 2, split_method=method) == ("blocks.4",)
    with torch.device("meta"):
        assert split(Model(), IDS, split_method="flops") == ("blocks.4",)


def test_tied_weights_count_on_both_ends() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    assert split(model, None, 3, split_method="parameters") == ("blocks.1", "blocks.4")


def test_an_encoder_decoder_is_split_by_what_its_blocks_do() -> None:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 4}
    config = T5Config(vocab_size=64, **sizes, decoder_start_token_id=0, pad_token_id=0)  # pyright: ignore[reportCallIssue]: known to its base
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    ids = torch.arange(16).view(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    plan = with_constraints(
        ParallelPlan(), {"pipeline_parallel.size": 2, "pipeline_parallel.split_method": "flops"}
    )
    found = with_split_points(plan, model, batch, places_outside(plan, model))
    points = found.pipeline_parallel.split_points
    # Uniform is "decoder.block.0"; blocks of the decoder attend twice, and the head is behind.
    assert points == ("decoder.block.1",)
    check_pipeline(plan, model, batch)


@pytest.mark.parametrize(
    ("section", "batch", "told"),
    [
        (
            {"split_method": "manual"},
            IDS,
            "split_method 'manual' needs 1 pipeline_parallel.split_points, .* got none",
        ),
        (
            {"split_points": ("blocks.1",), "size": 3},
            IDS,
            "expected 2 pipeline_parallel.split_points for 3 stages, got 1",
        ),
        (
            {"split_method": "flops", "size": 6},
            IDS,
            "at most 5 pipeline stages, one per block of Model, got 6",
        ),
        (
            {"split_method": "auto"},
            None,
            "split_method 'auto' counts .* of Model does, and no example .* split_method .param",
        ),
        (
            {"split_method": "memory"},
            torch.zeros(2, 3, 4, dtype=torch.complex64),
            "split_method 'memory' counts .* could not be run",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    section: dict[str, Any], batch: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        split(Model(), batch, **section)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"split_method to be one of \['uniform', .*'manual'\]"):
        PipelineParallel(size=2, split_method="time")  # pyright: ignore[reportArgumentType]: wrong
