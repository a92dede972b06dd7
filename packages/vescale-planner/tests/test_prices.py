"""Prices, each by a formula that is worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from vescale_parallel import StagePlacement, simulate_schedule
from vescale_planner import Cluster, generate_plan
from vescale_planner._partition import PipelineRank, Sharded, local_parts, pipeline_ranks
from vescale_planner._parts import ParameterSize, Part, keys_share
from vescale_planner._prices.collectives import Group, all_gather, exchange, send
from vescale_planner._prices.columns import Numerics
from vescale_planner._prices.cost import (
    Cost,
    felt_bubble,
    idle_passes,
    shape_efficiency,
    step_cost,
)
from vescale_planner._prices.memory import peak_memory
from vescale_planner._search.ranking import TIE
from vescale_planner._space.candidates import Candidate
from vescale_planner._space.layouts import Layout
from vescale_planner._workload import Workload, computed_in, workload_of

# Round numbers, nothing taken off and no latency.
PLAIN = Cluster(
    name="plain",
    memory_bytes=10**12,
    reserved_bytes=0,
    flops_per_second={2: 1e14, 4: 1e13},
    memory_bytes_per_second=1e12,
    ranks_per_node=8,
    intra_bytes_per_second=4e11,
    inter_bytes_per_second=5e10,
    intra_latency_seconds=0.0,
    inter_latency_seconds=0.0,
    launch_seconds=0.0,
    efficiency=1.0,
    attention_efficiency=0.5,
    memory_efficiency=1.0,
    link_efficiency=1.0,
    overlap=1.0,
    interference=0.0,
)
GIVEN = Numerics(states=0, compute_itemsize=2)


def _workload(blocks: int = 4, **changes: float) -> Workload:
    """Blocks of 1e9 elements of 2 bytes that compute 1e13 flops a row, 0.3 s there and back."""
    numbers = {"flops": 1e13, "saved_bytes": 0.0, "output_bytes": 0.0, **changes}
    each = tuple(
        replace(Part(parameters=(ParameterSize(f"{i}.w", 10**9, 2 * 10**9),)), **numbers)
        for i in range(blocks)
    )
    return Workload(
        before=Part(),
        blocks=each,
        after=Part(),
        tied=(),
        block_names=tuple(map(str, range(blocks))),
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


def _candidate(
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    *,
    zero_stage: int = 0,
    microbatches: int = 1,
    accumulation: int = 1,
    rows: int = 1,
) -> Candidate:
    return Candidate(
        layout=Layout(tp, pp, dp),
        zero_stage=zero_stage,
        replicate=1,
        schedule="1f1b",
        virtual_stages=1,
        microbatches=microbatches,
        recompute="none",
        rows=rows,
        accumulation=accumulation,
    )


def _ranks(
    candidate: Candidate,
    workload: Workload,
    *,
    cut_logits: bool = False,
    gathered: frozenset[str] = frozenset(),
) -> tuple[PipelineRank, ...]:
    sharded = frozenset(p.fqn for part in workload.parts for p in part.parameters)
    given = Sharded(sharded, gathered)
    parts = local_parts(workload, given, candidate.layout.tp, cut_logits=cut_logits)
    starts = list(range(0, len(workload.blocks), len(workload.blocks) // candidate.stages))
    return pipeline_ranks(workload, parts, starts, StagePlacement(candidate.layout.pp, 1))


def _cost(
    candidate: Candidate,
    workload: Workload | None = None,
    cluster: Cluster = PLAIN,
    numerics: Numerics = GIVEN,
) -> Cost:
    ranks = _ranks(candidate, workload or _workload())
    return step_cost(candidate, ranks, cluster, numerics=numerics)


def _around(candidate: Candidate, cluster: Cluster = PLAIN) -> float:
    """Return the operators' worth of time that a step takes where nothing runs ahead."""
    seconds = 1e-5
    between = replace(cluster, launch_seconds=seconds, runs_ahead=False)
    return (
        _cost(candidate, cluster=between).step - _cost(candidate, cluster=cluster).step
    ) / seconds


def test_processors_start_operators_between_computing() -> None:
    ahead = replace(PLAIN, launch_seconds=1e-5)
    assert _cost(_candidate(), cluster=ahead).step == _cost(_candidate()).step
    # 50 operators of each of 4 blocks, in three passes; a parameter each has 8 of its gradient's.
    of_pass = 4 * (3 * 50 + 8)
    assert _around(_candidate()) == pytest.approx(of_pass + 4 * 7)
    assert _around(replace(_candidate(), recompute="full")) == pytest.approx(
        of_pass + 4 * (50 + 150) + 4 * 7
    )
    assert _around(replace(_candidate(rows=2), accumulation=2)) == pytest.approx(2 * of_pass + 28)
    # A stage of a pipeline has its own, of every micro-batch.
    piped = _candidate(pp=2, microbatches=4, rows=4)
    between = replace(ahead, runs_ahead=False)
    costs = [_cost(piped, cluster=each) for each in (PLAIN, between)]
    counted = 4 * (2 * (3 * 50 + 8) + 350)
    assert costs[1].compute - costs[0].compute == pytest.approx(counted * 1e-5)


@pytest.mark.parametrize(("zero_stage", "collectives"), [(0, 1), (1, 2), (3, 3)])
def test_processors_handle_gradients_and_collectives_between_computing(
    zero_stage: int, collectives: int
) -> None:
    candidate = replace(_candidate(dp=2, zero_stage=zero_stage), reshards=zero_stage == 3)
    around = 4 * (3 * 50 + 8 + 7) + 4 * (45 * collectives + 20)
    assert _around(candidate) == pytest.approx(around)


def test_tensor_parallel_ranks_wait_while_others_compute() -> None:
    given = _workload()
    handing = replace(given, blocks=tuple(replace(b, output_bytes=1.0) for b in given.blocks))

    def sent(candidate: Candidate, cluster: Cluster) -> float:
        return _cost(candidate, handing, cluster).tensor_parallel

    slow = replace(PLAIN, intra_latency_seconds=1e-3)
    shared = replace(slow, alone_speed=2.0)
    alone, among_others = _candidate(tp=2), _candidate(tp=2, dp=2)
    assert sent(alone, slow) == sent(alone, shared)
    # Four sums of each of 4 blocks, of two messages.
    saved = sent(among_others, slow) - sent(among_others, shared)
    assert saved == pytest.approx(4 * 4 * 2 * 1e-3 / 2)
    between = replace(slow, launch_seconds=1e-5, runs_ahead=False)
    assert sent(alone, between) - sent(alone, slow) == pytest.approx(4 * 4 * 100 * 1e-5)


@pytest.mark.parametrize(("recompute", "gathers"), [("none", 2), ("full", 3)])
def test_norms_over_sharded_features_are_gathered_around_in_every_pass(
    recompute: Literal["none", "full"], gathers: int
) -> None:
    given = _workload()
    blocks = (
        replace(given.blocks[0], norm_bytes=(("norm", 1e9), ("act", 2e9))),
        *given.blocks[1:],
    )
    candidate = replace(_candidate(tp=4), recompute=recompute)
    ranks = _ranks(candidate, replace(given, blocks=blocks), gathered=frozenset({"norm"}))
    cost = step_cost(candidate, ranks, PLAIN, numerics=GIVEN)
    one = all_gather(candidate.rows_of_part * 1e9, Group(4), PLAIN)
    assert cost.tensor_parallel == pytest.approx(gathers * one)


def test_ranks_of_a_node_add_up_their_cards() -> None:
    # 16 GB over 2 nodes of 8: 8 GB enter each node over 8 cards of 50 GB/s, 20 ms; inside
    # 15/16 of 16 GB at 400 GB/s take 37.5 ms at the same time.
    assert all_gather(16e9, Group(16), PLAIN) == pytest.approx(0.0375)
    slow = replace(PLAIN, inter_bytes_per_second=1e10)
    assert all_gather(16e9, Group(16), slow) == pytest.approx(8e9 / (8 * 1e10))


def test_ranks_of_a_node_share_the_cards_that_it_has() -> None:
    one = replace(PLAIN, nics_per_node=1)
    assert all_gather(16e9, Group(16), one) == pytest.approx(8e9 / 5e10)
    # One rank a node of each of eight groups has an eighth of the card.
    assert all_gather(16e9, Group(2, stride=8), one) == pytest.approx(8e9 / (5e10 / 8))


def test_a_group_that_strides_over_nodes_has_one_card_in_each() -> None:
    assert all_gather(16e9, Group(4, stride=8), PLAIN) == pytest.approx(12e9 / 5e10)
    assert all_gather(16e9, Group(4, stride=2), PLAIN) == pytest.approx(12e9 / 4e11)


def test_sums_in_rank_order_send_every_copy_to_other_nodes() -> None:
    # Of 16 rows of 1 GB a rank sends 8 to the other node over its own card.
    assert exchange(16e9, Group(16), PLAIN) == pytest.approx(8e9 / 5e10)
    assert exchange(16e9, Group(8), PLAIN) == pytest.approx(all_gather(16e9, Group(8), PLAIN))


def test_direct_messages_take_one_round_and_trees_several() -> None:
    late = replace(PLAIN, intra_latency_seconds=1e-3, inter_latency_seconds=1e-2)
    assert exchange(0.0, Group(8), late) == pytest.approx(1e-3)
    assert exchange(0.0, Group(16), late) == pytest.approx(1e-2)
    assert all_gather(0.0, Group(16), late, messages=2) == pytest.approx(2 * (3e-3 + 1e-2))


def test_stages_on_other_nodes_send_over_the_card() -> None:
    assert send(1e9, Group(2, stride=4), PLAIN) == pytest.approx(1e9 / 4e11)
    assert send(1e9, Group(2, stride=8), PLAIN) == pytest.approx(1e9 / 5e10)


# Of four blocks of 2 GB over 8 ranks of a node 7/8 of 8 GB are sent: 17.5 ms.
ONCE = 7 / 8 * 8e9 / 4e11


def test_one_backward_hides_all_reductions_but_the_last_block_s() -> None:
    # An all-reduce is twice that, and backward of a row takes 0.8 s.
    assert _cost(_candidate(dp=8)).data_parallel == pytest.approx(2 * ONCE / 4)
    bare = replace(PLAIN, overlap=0.0)
    assert _cost(_candidate(dp=8), cluster=bare).data_parallel == pytest.approx(2 * ONCE)


def test_gradients_summed_over_micro_batches_first_hide_behind_nothing() -> None:
    for candidate in (
        _candidate(dp=8, accumulation=4, rows=4),
        _candidate(dp=8, zero_stage=1, accumulation=4, rows=4),
    ):
        assert _cost(candidate).data_parallel == pytest.approx(2 * ONCE)
    pipeline = _candidate(pp=2, dp=8, microbatches=4, rows=4)
    wide = replace(PLAIN, ranks_per_node=16)
    assert _cost(pipeline, cluster=wide).data_parallel == pytest.approx(2 * ONCE / 2)


def test_stages_one_and_two_gather_before_forward_and_hide_nothing_of_it() -> None:
    for stage in (1, 2):
        found = _cost(_candidate(dp=8, zero_stage=stage)).data_parallel
        assert found == pytest.approx(ONCE + ONCE / 4)


def test_stage_three_gathers_behind_compute_if_it_prefetches() -> None:
    candidate = _candidate(dp=8, zero_stage=3)
    # Of the gather of forward, and of gather and reduction of backward, a quarter each.
    assert _cost(candidate).data_parallel == pytest.approx(ONCE / 4 + 2 * ONCE / 4)
    found = _cost(replace(candidate, prefetch=0)).data_parallel
    assert found == pytest.approx(2 * ONCE + ONCE / 4)


def test_gradients_are_sent_in_the_dtype_that_they_are_summed_in() -> None:
    candidate = _candidate(dp=8, accumulation=4, rows=4)
    wide = _cost(candidate, numerics=replace(GIVEN, reduce_itemsize=4))
    assert wide.data_parallel == pytest.approx(2 * _cost(candidate).data_parallel)


def test_memory_bound_work_comes_on_top_of_products() -> None:
    # 1 GB a block, written and read in forward and backward: 4 GB at 1 TB/s.
    found = _cost(_candidate(), _workload(saved_bytes=1e9))
    assert found.matrix == pytest.approx(4 * 3 * 1e13 / 1e14)
    assert found.memory_bound == pytest.approx(4 * 4e9 / 1e12)
    assert found.step >= found.matrix + found.memory_bound


def test_attention_has_a_speed_of_its_own() -> None:
    found = _cost(_candidate(), _workload(attention_flops=1e12))
    assert found.matrix == pytest.approx(4 * 3 * 9e12 / 1e14)
    # Backward computes the scores again: 2.5 times forward.
    assert found.attention == pytest.approx(4 * 3.5 * 1e12 / (1e14 * 0.5))


def test_attention_of_a_model_is_what_its_matrices_do_not_compute() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(2, 16, dtype=torch.long)
    workload = workload_of(model, {"input_ids": ids, "labels": ids})
    # Scores and values: two products of 16 x 16 x 32 a row.
    assert workload.blocks[0].attention_flops == 2 * 2 * 16 * 16 * 32
    assert workload.returns_loss


def test_cut_logits_are_priced_and_counted_cut() -> None:
    head = Part(
        parameters=(ParameterSize("head", 10**8, 2 * 10**8),),
        saved_bytes=8e9,
        output_bytes=4e9,
        input_bytes=1e8,
    )
    workload = replace(_workload(), after=head, output_bytes=4e9)
    candidate = _candidate(tp=8)
    found = {}
    for cut in (False, True):
        ranks = _ranks(candidate, workload, cut_logits=cut)
        memory = peak_memory(candidate, ranks, numerics=GIVEN, output_bytes=workload.output_bytes)
        found[cut] = memory, step_cost(candidate, ranks, PLAIN, numerics=GIVEN)
    # Logits, and in float32 their gradient and that of their logarithms; where they are cut, their
    # exponentials, too.
    assert found[False][0].output == 4e9 * (1 + 2 * 2)
    assert found[True][0].output == 4e9 / 8 * (1 + 3 * 2)
    assert found[False][0].activations - found[True][0].activations == pytest.approx(7e9)
    # Whole logits are gathered; the gradient of the head's input is summed either way.
    sums = 2 * 7 / 8 * 1e8 / 4e11
    assert found[True][1].tensor_parallel == pytest.approx(sums)
    assert found[False][1].tensor_parallel == pytest.approx(sums + 7 / 8 * 4e9 / 4e11)
    assert found[True][1].memory_bound == pytest.approx(found[False][1].memory_bound / 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_activations_are_as_wide_as_compute() -> None:
    workload = workload_of(Net(), torch.zeros(8, 64))
    narrow = computed_in(workload, 2)
    assert workload.itemsize == 4
    for wide, half in zip(workload.blocks, narrow.blocks, strict=True):
        assert half.saved_bytes == wide.saved_bytes / 2
        assert half.output_bytes == wide.output_bytes / 2
        assert half.flops == wide.flops
    assert computed_in(workload, 4) is workload


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m"),
    [("gpipe", 4, 1, 8), ("1f1b", 4, 1, 64), ("interleaved_1f1b", 4, 2, 8), ("zbv", 2, 2, 4)],
)
def test_bubbles_are_those_of_the_simulated_schedule(
    schedule: str, p: int, v: int, m: int
) -> None:
    found = simulate_schedule(schedule, size=p, virtual_stages=v, microbatches=m)
    assert idle_passes(schedule, p, v, m) == pytest.approx(found.seconds / 3 - m * v)
    if schedule != "zbv":
        assert idle_passes(schedule, p, v, m) == pytest.approx(p - 1)


class Odd(nn.Module):
    """Multiplies by a weight with an operator that has no rule for its flops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.weight).mean()


def test_operators_whose_flops_nobody_knows_are_named() -> None:
    plan = generate_plan(Odd(), world_size=1, cluster=PLAIN, example_batch=torch.ones(4, 8))
    assert any("flops lack those of" in reason for reason in plan.reasons)


def test_ties_are_within_three_percent() -> None:
    assert TIE <= 1.03


def test_copies_that_share_out_state_gather_once_a_step_and_hold_less() -> None:
    hybrid = replace(_candidate(dp=16, zero_stage=3, accumulation=4, rows=4), replicate=2)
    shared, nothing_hides = replace(hybrid, shares_state=True), replace(PLAIN, overlap=0.0)
    costs = [_cost(each, cluster=nothing_hides).data_parallel for each in (hybrid, shared)]
    # Four blocks of 2e9 bytes, an eighth of them on a rank, to one other copy.
    gather = all_gather(4 * 2e9 / 8, Group(2, 8), nothing_hides)
    assert costs[0] - costs[1] == pytest.approx((4 - 1) * gather)
    workload = _workload()
    numerics = Numerics(states=2, compute_itemsize=2)
    of_hybrid, of_shared = (
        peak_memory(each, _ranks(each, workload), numerics=numerics, output_bytes=0.0)
        for each in (hybrid, shared)
    )
    assert of_hybrid.optimizer == 2 * 8e9 / 8
    assert of_shared.optimizer == 2 * 8e9 / 16
    assert of_hybrid.gradients - of_shared.gradients == 8e9 / 8 - 8e9 / 16
    assert of_shared.parameters == of_hybrid.parameters


def test_narrow_matrices_reach_less_of_the_peak() -> None:
    assert shape_efficiency(256, 256) == pytest.approx(0.5)
    assert shape_efficiency(768, 256) == pytest.approx(0.75)
    # Whose width is not known: convolutions, and what has no matrix.
    assert shape_efficiency(0, 256) == 1.0


def test_parts_are_as_wide_as_their_matrices() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))

    # 8 x 32 of width 8, 32 x 4 of width 4.
    workload = workload_of(Two(), torch.ones(1, 8))
    assert sum(p.width for p in workload.parts) == pytest.approx((256 * 8 + 128 * 4) / 384)


def test_compute_takes_longer_while_collectives_run_behind_it() -> None:
    candidate = _candidate(dp=8)
    alone = _cost(candidate).data_parallel
    found = _cost(candidate, cluster=replace(PLAIN, interference=0.2)).data_parallel
    # Of four blocks' reductions one is not hidden.
    assert found == pytest.approx(alone * (1 + 0.2 * 3))


def _matrices(*shapes: tuple[int, int]) -> tuple[ParameterSize, ...]:
    return tuple(
        ParameterSize(f"m{i}.weight", rows * columns, 2 * rows * columns, min(rows, columns))
        for i, (rows, columns) in enumerate(shapes)
    )


@pytest.mark.parametrize(
    ("matrices", "share"),
    [
        ([(64, 64)] * 4 + [(172, 64)] * 3, 2.0),
        ([(64, 64)] * 2 + [(16, 64)] * 2 + [(172, 64)] * 3, 0.5),
        # A router, and experts of their own; queries, keys and values in one matrix; low ranks.
        ([(64, 64)] * 2 + [(16, 64)] * 2 + [(8, 64)] + [(172, 64)] * 16, 0.5),
        ([(192, 64), (64, 64), (256, 64), (64, 256)], 2.0),
        ([(24, 64), (96, 24), (16, 64), (96, 16), (64, 64)], 2.0),
        ([], 2.0),
    ],
)
def test_keys_that_queries_share_are_narrower(
    matrices: list[tuple[int, int]], share: float
) -> None:
    assert keys_share(_matrices(*matrices)) == share


def test_slices_of_a_sequence_send_what_their_method_needs() -> None:
    workload = _workload()
    # Bytes of a block for a row: 4e6 of the hidden state, keys and values a quarter of it.
    blocks = tuple(replace(each, output_bytes=4e6, keys_bytes=1e6) for each in workload.blocks)
    workload = replace(workload, blocks=blocks)
    sliced = replace(_candidate(), layout=Layout(1, 1, 1, 4))
    costs = {
        how: _cost(replace(sliced, attends=how), workload, cluster=PLAIN).context_parallel
        for how in ("all_to_all", "ring", "gather")
    }
    assert costs["ring"] == costs["gather"]
    once = all_gather(1e6 * sliced.rows, Group(4), PLAIN)
    assert costs["gather"] == pytest.approx(len(blocks) * 2 * once)
    heads = exchange((1e6 + 2 * 4e6) * sliced.rows / 4, Group(4), PLAIN, messages=2)
    assert costs["all_to_all"] == pytest.approx(len(blocks) * 2 * heads)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_what_is_updated_in_another_dtype_is_sharded(zero_stage: int) -> None:
    candidate, workload = _candidate(dp=8, zero_stage=zero_stage), _workload()
    numerics = Numerics(states=2, compute_itemsize=1, casts=True)
    ranks = _ranks(candidate, workload)
    found = peak_memory(candidate, ranks, numerics=numerics, output_bytes=0.0).parameters
    numel = sum(part.numel for part in workload.parts)
    nbytes = sum(each.nbytes for part in workload.parts for each in part.parameters)
    assert found == numel + nbytes / 8


def test_a_block_that_runs_again_has_the_memory_of_what_the_loss_let_go_of() -> None:
    blocks = _workload(saved_bytes=6e9, input_bytes=1e9)
    candidate = replace(_candidate(), recompute="full")

    def activations(behind: float, output: float) -> float:
        workload = replace(blocks, after=Part(saved_bytes=behind), output_bytes=output)
        ranks = _ranks(candidate, workload)
        found = peak_memory(candidate, ranks, numerics=GIVEN, output_bytes=output)
        return found.activations

    alone = activations(0.0, 0.0)
    assert activations(1e9, 0.0) == alone  # kept by the loss, and let go of before the block
    assert activations(0.0, 5e8) == alone  # as is the gradient of the output
    assert activations(9e9, 0.0) == alone - 6e9 + 9e9  # more than the block keeps


def test_processors_keep_what_gradients_are_sent_from_and_arrive_in() -> None:
    head = Part(parameters=(ParameterSize("head", 10**9, 3 * 10**9),))
    light = replace(_workload(saved_bytes=0.0), after=head)
    heavy = replace(_workload(saved_bytes=9e9), after=head)
    whole, block = 11e9, 2e9
    given = {
        "gpu": GIVEN, "cpu": replace(GIVEN, keeps_buffers=Cluster.preset("cpu").keeps_buffers)
    }  # fmt: skip

    def gradients(where: str, candidate: Candidate, workload: Workload) -> float:
        ranks = _ranks(candidate, workload)
        return peak_memory(candidate, ranks, numerics=given[where], output_bytes=0.0).gradients

    scattered, summed = _candidate(dp=8, zero_stage=2), _candidate(dp=8)
    buffers = (3e9 + block) + 3e9
    for where in ("gpu", "cpu"):  # when all are reduced
        assert gradients(where, scattered, light) == whole / 8 + buffers
        assert gradients(where, summed, light) == whole + 3e9
    # When forward ends, with gradients of the step before.
    assert gradients("gpu", scattered, heavy) == whole / 8
    assert gradients("gpu", summed, heavy) == whole
    assert gradients("cpu", scattered, heavy) == whole / 8 + buffers
    assert gradients("cpu", summed, heavy) == whole + 3e9
    # Added up first, while nothing is kept.
    assert gradients("cpu", _candidate(dp=8, accumulation=2, rows=2), heavy) == whole


def test_gradients_of_a_pipeline_are_whole_until_it_reduces() -> None:
    candidate = _candidate(dp=8, pp=2, zero_stage=2, microbatches=4, rows=4)
    ranks = _ranks(candidate, _workload(saved_bytes=9e9))
    once, often = (
        peak_memory(candidate, ranks, numerics=each, output_bytes=0.0).gradients
        for each in (GIVEN, replace(GIVEN, sums_first=False))
    )
    assert once == 2 * 2e9
    assert often == 2 * 2e9 / 8 + 2 * 2e9


def test_waiting_ranks_leave_shared_processors_to_the_others() -> None:
    """As steps of a pipeline take whose ranks compute as fast as those that compute let them."""

    def seconds_of(size: int, microbatches: int, processors: float) -> float:
        slots = [*range(1, size), *[size] * (microbatches - size + 1), *range(size - 1, 0, -1)]
        return sum(max(1.0, active / processors) for active in slots)

    for size, processors in ((2, 1), (4, 2), (4, 3), (4, 4)):
        busy = 8 * size / processors  # micro-batches, all ranks computing
        bubble = (size - 1) * size / processors * felt_bubble(size, size / processors)
        assert busy + bubble == pytest.approx(seconds_of(size, 8, processors))
    assert felt_bubble(8, 1.0) == 1.0
