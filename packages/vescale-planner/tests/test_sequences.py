"""Ranks that share sequences: obeyed if asked for, chosen if nothing else fits, else refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_planner import Cluster, generate_plan
from vescale_planner._search.search import Search
from vescale_planner._sequences import Contexts, priced_contexts, said
from vescale_planner._workload import workload_of

WIDTH, TOKENS = 16, 2**13
CP = "context_parallel.size"
FLAT: dict[str, Any] = {
    "batch.global_size": 4, "tensor_parallel.size": 1, "pipeline_parallel.size": 1
}  # fmt: skip
H100 = replace(Cluster.preset("h100"), reserved_bytes=0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(-2, -3).flatten(-2))


class Sums(Attention):
    """Mixes positions by a sum over those before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.cumsum(1)


class Language(nn.Module):
    def __init__(self, block: type[Attention] = Attention) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


IDS = torch.zeros(1, TOKENS, dtype=torch.long)


def test_a_size_that_is_asked_for_is_obeyed() -> None:
    given = {CP: 2, "data_parallel.zero_stage": 1}
    plan = generate_plan(Language(), given, world_size=4, cluster=H100, example_batch=IDS)
    assert plan.context_parallel.size == 2
    assert plan.world_size == 4
    assert not any("attention can be sliced" in each for each in plan.reasons)


def too_small() -> Cluster:
    """Return machines whose memory is too small for whole sequences."""
    work = workload_of(Language(), IDS)
    search = Search(Language(), work, H100, FLAT, 2, "flops", accumulates=True)
    whole = min(each.needed_bytes for each in search.run(4).fits)
    return replace(H100, memory_bytes=whole - 1)


def test_it_is_chosen_where_nothing_else_fits() -> None:
    plan = generate_plan(Language(), FLAT, world_size=4, cluster=too_small(), example_batch=IDS)
    assert plan.context_parallel.size > 1
    roomy = generate_plan(Language(), FLAT, world_size=4, cluster=H100, example_batch=IDS)
    assert roomy.context_parallel.size == 1


def test_one_row_for_many_ranks_is_shared() -> None:
    given = {**FLAT, "batch.global_size": 1}
    plan = generate_plan(Language(), given, world_size=4, cluster=H100, example_batch=IDS)
    assert (plan.context_parallel.size, plan.data_parallel.size) == (4, 1)


@pytest.mark.parametrize("asked", [True, False])
def test_what_cannot_be_sliced_is_refused_as_the_runtime_does(asked: bool) -> None:
    cluster = H100 if asked else too_small()
    given = {**FLAT, CP: 4} if asked else FLAT
    with pytest.raises(ValueError, match=r"Language is not one device's on slices"):
        generate_plan(Language(Sums), given, world_size=4, cluster=cluster, example_batch=IDS)


def test_without_an_example_it_is_assumed_and_said() -> None:
    plan = generate_plan(Language(), {CP: 2}, world_size=2, cluster=H100)
    assert plan.context_parallel.size == 2
    assert any("attention can be sliced" in each for each in plan.reasons)


def test_slices_of_long_sequences_are_priced_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Language()
    given = {"batch.global_size": 2, "tensor_parallel.size": 1, "pipeline_parallel.size": 1}
    with caplog.at_level("DEBUG", logger="vescale.planner"):
        plan = generate_plan(model, given, world_size=2, cluster=H100, example_batch=IDS)
    # One row a rank is as fast, without sending anything.
    assert plan.context_parallel.size == 1
    assert not any(each.startswith("priced, not chosen") for each in plan.reasons)
    assert "with context parallelism were priced" in caplog.text
    # Two rows for eight ranks: only slices have work for all.
    search = Search(model, workload_of(model, IDS), H100, given, 2, "flops")
    contexts = priced_contexts(search, 8)
    best = contexts.fits[0]
    assert (best.candidate.layout.dp, best.candidate.layout.cp, best.candidate.rows) == (2, 4, 1)
    assert contexts.num_scored > 4
    [whole] = search.run(2).fits[:1]
    slow = replace(whole, step_seconds=2 * best.seconds_per_row * 2)
    assert "0.5 x the time" in said(contexts, slow)[0]
    assert said(contexts, replace(slow, step_seconds=slow.step_seconds / 2)) == []
    short = Search(model, workload_of(model, IDS[:, :1024]), H100, given, 2, "flops")
    assert priced_contexts(short, 8) == Contexts((), 0)
