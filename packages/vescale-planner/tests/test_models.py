"""The memory and the cost model, as functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vescale_parallel import StagePlacement
from vescale_planner import Cluster
from vescale_planner._partition import (
    LocalPart,
    PipelineRank,
    Sharded,
    local_parts,
    pipeline_ranks,
)
from vescale_planner._parts import ParameterSize, Part
from vescale_planner._prices.activations import passes_in_flight
from vescale_planner._prices.columns import Numerics
from vescale_planner._prices.cost import step_cost
from vescale_planner._prices.memory import optimizer_states, peak_memory
from vescale_planner._space.candidates import Candidate, Rows, candidates
from vescale_planner._space.layouts import Layout, layouts
from vescale_planner._workload import Workload

H200 = Cluster.preset("h200")
PLAIN = Numerics(states=2, compute_itemsize=2)


def _workload() -> Workload:
    def part(name: str) -> Part:
        return Part(
            parameters=(ParameterSize(f"{name}.weight", 10**9, 2 * 10**9),),
            flops=2e12,
            saved_bytes=1e9,
            output_bytes=1e7,
            products_bytes=4e8,
        )

    return Workload(
        before=Part(),
        blocks=tuple(part(str(index)) for index in range(8)),
        after=Part(),
        tied=(),
        block_names=tuple(map(str, range(8))),
        no_pipeline="",
        rows=1,
        itemsize=2,
        output_bytes=0.0,
        tokens=16,
        observed=True,
        head_modules=(),
        tail_modules=(),
        assumptions=(),
    )


def _candidate(tp: int = 1, pp: int = 1, dp: int = 1, **changes: int | str) -> Candidate:
    plain = Candidate(
        layout=Layout(tp, pp, dp),
        zero_stage=0,
        replicate=1,
        schedule="1f1b",
        virtual_stages=1,
        microbatches=1,
        recompute="none",
        rows=8,
    )
    return replace(plain, **changes)


def _ranks(candidate: Candidate, *, sequence: bool = False) -> tuple[PipelineRank, ...]:
    workload = _workload()
    sharded = Sharded(frozenset(f"{index}.weight" for index in range(8)))
    parts = local_parts(workload, sharded, candidate.layout.tp, sequence=sequence)
    starts = list(range(0, 8, 8 // candidate.stages))
    placement = StagePlacement(candidate.layout.pp, candidate.virtual_stages)
    return pipeline_ranks(workload, parts, starts, placement)


def _memory(candidate: Candidate) -> float:
    return peak_memory(candidate, _ranks(candidate), numerics=PLAIN, output_bytes=0.0).total


def _seconds(candidate: Candidate, cluster: Cluster = H200) -> float:
    return step_cost(candidate, _ranks(candidate), cluster, numerics=PLAIN).step


def test_one_rank_holds_parameters_gradients_states_and_activations() -> None:
    # 16 GB of parameters, as much of gradients, twice as much of states, 8 GB a row.
    assert _memory(_candidate()) == pytest.approx(16e9 * 4 + 8e9 * 8)


def test_every_zero_stage_takes_less_memory() -> None:
    used = [_memory(_candidate(dp=8, zero_stage=stage, accumulation=2)) for stage in range(4)]
    assert used == sorted(used, reverse=True)
    assert len(set(used)) == 4


def test_gradients_of_one_pass_come_as_activations_go() -> None:
    """ZeRO 1 reduces them block by block then, as ZeRO 2 does, after those of the last step."""
    used = [_memory(_candidate(dp=8, zero_stage=stage)) for stage in (1, 2)]
    assert used[0] == used[1] == pytest.approx(16e9 + (1 + 2) * 16e9 / 8 + 8e9 * 8)


def test_replicas_of_shards_hold_more_than_shards_alone() -> None:
    sharded = _candidate(dp=8, zero_stage=3)
    assert _memory(replace(sharded, replicate=4)) > _memory(sharded)


@pytest.mark.parametrize("prefetch", range(5))
def test_blocks_gathered_ahead_are_whole_beside_the_one_that_runs(prefetch: int) -> None:
    candidate = _candidate(dp=8, zero_stage=3, prefetch=prefetch)
    found = peak_memory(candidate, _ranks(candidate), numerics=PLAIN, output_bytes=0.0)
    assert found.parameters == pytest.approx(16e9 / 8 + 2e9 * (prefetch + 1))


def test_gathers_that_nothing_was_gathered_ahead_of_hide_nowhere() -> None:
    sharded = _candidate(dp=8, zero_stage=3)
    waits = replace(sharded, prefetch=0)
    assert _seconds(waits) > _seconds(sharded) == _seconds(replace(sharded, prefetch=2))
    gathered_once = [replace(_candidate(dp=8, zero_stage=2), prefetch=depth) for depth in (0, 1)]
    assert _seconds(gathered_once[0]) == _seconds(gathered_once[1])


def test_blocks_that_stay_gathered_take_memory_and_spare_a_gather() -> None:
    candidate = _candidate(dp=8, zero_stage=3)
    kept = replace(candidate, reshards=False)
    memory, more = (
        peak_memory(each, _ranks(each), numerics=PLAIN, output_bytes=0.0)
        for each in (candidate, kept)
    )
    assert more.parameters == pytest.approx(16e9 / 8 + 16e9)
    assert more.optimizer == memory.optimizer
    slow = replace(H200, overlap=0.0)
    assert _seconds(kept, slow) < _seconds(candidate, slow)


@pytest.mark.parametrize(
    ("stage", "offload", "parameters", "gradients"),
    [
        (1, "optimizer", 16e9, 16e9),
        (3, "optimizer", 16e9 / 8 + 2 * 2e9, 2e9),
        (3, "parameters", 2 * 2e9, 2e9),
    ],
)
def test_what_is_on_the_host_takes_no_memory_of_the_device(
    stage: int, offload: str, parameters: float, gradients: float
) -> None:
    candidate = _candidate(dp=8, zero_stage=stage, offload=offload)
    found = peak_memory(candidate, _ranks(candidate), numerics=PLAIN, output_bytes=0.0)
    assert (found.parameters, found.gradients) == pytest.approx((parameters, gradients))
    assert found.optimizer == 0.0


def test_parameters_divide_by_tensor_and_pipeline_parallelism() -> None:
    whole = peak_memory(_candidate(), _ranks(_candidate()), numerics=PLAIN, output_bytes=0.0)
    for split in (_candidate(tp=4), _candidate(pp=4, microbatches=8)):
        found = peak_memory(split, _ranks(split), numerics=PLAIN, output_bytes=0.0)
        assert found.parameters == pytest.approx(whole.parameters / 4)
        assert found.optimizer == pytest.approx(whole.optimizer / 4)


# Of what these blocks keep, six hidden states are 0.06.
@pytest.mark.parametrize(("sequence", "factor"), [(False, 0.94 / 4 + 0.06), (True, 1 / 4)])
def test_a_cut_sequence_divides_all_activations(sequence: bool, factor: float) -> None:
    candidate = _candidate(tp=4)
    found = peak_memory(
        candidate,
        _ranks(candidate, sequence=sequence),
        numerics=PLAIN,
        output_bytes=0.0,
    )
    assert found.activations == pytest.approx(8e9 * 8 * factor)


def test_norms_and_residuals_keep_five_of_seventeen_hidden_states_whole() -> None:
    part = Part(saved_bytes=34.0, output_bytes=2.0)
    assert LocalPart(part, 1.0, 4, is_block=True).saved_bytes == pytest.approx(24 / 4 + 10)


def test_a_cut_sequence_divides_what_recomputation_keeps_and_stages_hand_over() -> None:
    candidate = _candidate(tp=4, pp=2, microbatches=8, recompute="full")
    kept, over = [], []
    for sequence in (False, True):
        ranks = _ranks(candidate, sequence=sequence)
        blocks = [part for part in ranks[0].parts if part.is_block]
        kept.append(sum(part.handed_bytes for part in blocks))
        over.append(step_cost(candidate, ranks, H200, numerics=PLAIN).pipeline)
    assert kept[0] == 4 * kept[1] == 4 * 1e7
    assert over[1] < over[0]


def test_recomputation_trades_time_for_memory() -> None:
    plain, again = _candidate(pp=2, microbatches=8), _candidate(pp=2, microbatches=8)
    again = replace(again, recompute="full")
    in_part = replace(again, recompute="selective")
    assert _memory(again) < _memory(in_part) < _memory(plain)
    assert _seconds(again) > _seconds(in_part) > _seconds(plain)


def test_mixed_precision_keeps_a_copy_of_the_parameters() -> None:
    candidate = _candidate()
    wide = peak_memory(
        candidate,
        _ranks(candidate),
        numerics=Numerics(states=2, compute_itemsize=4, casts=True),
        output_bytes=0.0,
    )
    assert wide.parameters == pytest.approx(16e9 + 32e9)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "rank", "passes"),
    [
        ("gpipe", 1, 0, 8),
        ("gpipe", 1, 3, 8),
        ("1f1b", 1, 0, 4),
        ("1f1b", 1, 3, 1),
        ("interleaved_1f1b", 2, 0, 11),
        ("interleaved_1f1b", 2, 3, 5),
        ("looped_bfs", 2, 0, 16),
        ("interleaved_zero_bubble", 1, 3, 4),
        ("zbv", 2, 0, 8),
        ("dualpipev", 2, 3, 9),
    ],
)
def test_schedules_keep_as_many_passes_as_the_literature_says(
    schedule: str, virtual_stages: int, rank: int, passes: int
) -> None:
    assert passes_in_flight(schedule, rank, 4, virtual_stages, 8) == passes


def test_the_bubble_is_that_of_the_formula() -> None:
    # (p - 1) / m of the compute, and divided by v if stages are interleaved.
    silent = replace(
        H200, intra_bytes_per_second=1e30, intra_latency_seconds=0.0, launch_seconds=0.0
    )
    plain = _candidate(pp=4, microbatches=8)
    cost = step_cost(plain, _ranks(plain), silent, numerics=replace(PLAIN, states=0))
    assert cost.pipeline / cost.compute == pytest.approx(3 / 8)
    twice = replace(plain, schedule="interleaved_1f1b", virtual_stages=2)
    cost = step_cost(twice, _ranks(twice), silent, numerics=replace(PLAIN, states=0))
    assert cost.pipeline / cost.compute == pytest.approx(3 / 16)


def test_compute_is_six_flops_over_what_the_device_reaches() -> None:
    candidate = _candidate(rows=64)
    cost = step_cost(candidate, _ranks(candidate), H200, numerics=PLAIN)
    assert cost.matrix == pytest.approx(3 * 8 * 64 * 2e12 / (989e12 * H200.efficiency))


def test_tensor_parallelism_across_nodes_costs_more() -> None:
    inside = _seconds(_candidate(tp=8))
    across = _seconds(_candidate(tp=8), replace(H200, ranks_per_node=4))
    assert across > inside


def test_stage_three_communicates_more_than_stage_one() -> None:
    # Bytes alone: rounds of a sum in rank order are not those of a gather.
    exposed = replace(H200, overlap=0.0, intra_latency_seconds=0.0, inter_latency_seconds=0.0)
    one, three = (
        step_cost(c, _ranks(c), exposed, numerics=PLAIN).data_parallel
        for c in (_candidate(dp=8, zero_stage=1), _candidate(dp=8, zero_stage=3))
    )
    assert three == pytest.approx(1.5 * one)


def test_layouts_are_all_products_of_the_world_size() -> None:
    found = layouts(8, {})
    assert len(found) == len(set(found)) == 10  # ordered factorizations of 2^3 into three
    assert all(each.tp * each.pp * each.dp == 8 for each in found)


def test_candidates_cut_the_batch_evenly() -> None:
    rows = Rows(global_size=24, example=None)
    for each in candidates(Layout(1, 2, 2), rows, [*"abcdefgh"], {}):
        assert isinstance(each, Candidate)
        assert each.rows == 12
        assert each.rows % each.microbatches == 0


def test_optimizers_differ_in_what_they_keep() -> None:
    assert [optimizer_states(name) for name in ("AdamW", "sgd-momentum", "sgd")] == [2, 1, 0]
