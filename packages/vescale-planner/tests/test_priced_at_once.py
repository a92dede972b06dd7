"""Thousands of candidates are priced at once, each as it would be alone, and few are tried."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import ScheduleName, check_micro_batches, check_pipeline
from vescale_planner import Cluster, _runnable, generate_plan
from vescale_planner._search.ranking import SearchResult
from vescale_planner._search.search import Search
from vescale_planner._sequences import with_sequence
from vescale_planner._space.candidates import Candidate
from vescale_planner._space.layouts import Layout
from vescale_planner._workload import workload_of

H100 = Cluster.preset("h100")


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x).square().mean()


IDS = torch.zeros(4, 16, dtype=torch.long)


def search(**constraints: Any) -> Search:
    given = {key.replace("__", "."): value for key, value in constraints.items()}
    model = Net()
    found = Search(model, workload_of(model, IDS), H100, given, 2, "flops", accumulates=True)
    found.shard(2, {"layers.*.weight": "Shard(0)", "head.<out>": "Shard(-1)"})
    return found


PIPELINED: tuple[tuple[ScheduleName, int], ...] = (
    ("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2),
)  # fmt: skip


def random_candidate(draw: random.Random) -> Candidate:
    layout = Layout(
        draw.choice((1, 2, 4, 16)), draw.choice((1, 2, 4)), draw.choice((1, 2, 8, 64)),
        draw.choice((1, 2)),
    )  # fmt: skip
    zero, pipelined = draw.choice((0, 1, 2, 3)) if layout.dp > 1 else 0, layout.pp > 1
    schedule, stages = draw.choice(PIPELINED if pipelined else PIPELINED[:1])
    microbatches = layout.pp * draw.choice((1, 2, 4)) if pipelined else 1
    accumulation = draw.choice((1, 2, 4))
    replicate = draw.choice((1, 2)) if zero and layout.dp > 2 else 1
    return Candidate(
        layout=layout,
        zero_stage=zero,
        replicate=replicate,
        schedule=schedule,
        virtual_stages=stages,
        microbatches=microbatches,
        recompute=draw.choice(("none", "selective", "full")),
        rows=microbatches * accumulation * draw.choice((1, 3)),
        accumulation=accumulation,
        prefetch=draw.choice((0, 1)),
        reduction=draw.choice(("ordered", "library")),
        reshards=zero < 3 or draw.choice((True, False)),
        shares_state=replicate > 1 and zero == 3 and draw.choice((True, False)),
    )


def test_priced_at_once_is_priced_alone() -> None:
    draw, priced = random.Random(0), search()
    plans = [random_candidate(draw) for _ in range(600)]
    together = {each.candidate: each for each in priced.scored(plans)}
    assert together.keys() == set(plans)
    for plan in plans:
        alone = search_alone(priced, plan)
        assert together[plan].step_seconds == alone[0]
        assert together[plan].needed_bytes == alone[1]


def search_alone(priced: Search, plan: Candidate) -> tuple[float, int]:
    """Return time and memory by the terms that are shown."""
    found = priced.score(plan)
    assert found.cost.step == found.step_seconds
    return found.cost.step, found.needed_bytes


@pytest.mark.parametrize("world_size", [64, 4096])
def test_the_fastest_is_that_of_one_at_a_time(world_size: int) -> None:
    priced = search(tensor_parallel__size=2)
    found = priced.run(world_size)
    every = [*found.fits, *found.too_large]
    again = min(every, key=lambda each: priced.cost(each.candidate).step)
    assert min(each.step_seconds for each in every) == again.step_seconds
    assert len({each.candidate for each in every}) == len(every) > 300


def test_copies_of_what_is_sharded_are_tried() -> None:
    found = search(tensor_parallel__size=1, pipeline_parallel__size=1).run(64)
    copies = {each.candidate.replicate for each in (*found.fits, *found.too_large)}
    assert copies == {1, 2, 4, 8, 16, 32}


def test_few_pipelines_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def counted(plan: Any, *given: Any) -> None:
        tried.append(plan.pipeline_parallel.size)
        check_pipeline(plan, *given)

    monkeypatch.setattr(_runnable, "check_pipeline", counted)
    generate_plan(Net(), world_size=64, cluster=H100, example_batch=IDS)
    assert len(tried) <= 2


def test_whether_rows_are_apart_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(plan: Any, *given: Any) -> None:
        asked.append(plan.pipeline_parallel.size)
        check_micro_batches(plan, *given)

    monkeypatch.setattr(_runnable, "check_micro_batches", counted)
    cut = {"batch.gradient_accumulation": 2, "data_parallel.zero_stage": 0}
    plan = generate_plan(Net(), cut, world_size=4, cluster=H100, example_batch=IDS)
    assert plan.pipeline_parallel.size == 1
    assert any(each.startswith("next: ") and "pipeline" in each for each in plan.reasons)
    assert asked == [1]
    # One that is returned is asked as well, of what has gradients.
    asked.clear()
    piped = {**cut, "pipeline_parallel.size": 2}
    generate_plan(Net(), piped, world_size=4, cluster=H100, example_batch=IDS)
    assert asked == [2]


@pytest.mark.parametrize("cuts_more", [False, True])
def test_what_a_sequence_cuts_alike_is_priced_once(
    cuts_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"layers.*.weight": "Shard(0)", "head.<out>": "Shard(-1)"}
    in_sequence = {**plan, "layers.0.<in>": "Replicate() -> Shard(1)"}
    if cuts_more:
        in_sequence["head.weight"] = "Shard(0)"
    priced, made = search(tensor_parallel__size=2), list[Search]()
    num_priced: list[int] = []
    scored, under = Search.scored, Search.under

    def counted(self: Search, candidates: Any) -> Any:
        plans = list(candidates)
        num_priced.append(len(plans))
        return scored(self, plans)

    def found(self: Search, *given: Any, **more: Any) -> Search:
        made.append(under(self, *given, **more))
        made[0].shard(2, in_sequence)
        return made[0]

    monkeypatch.setattr(Search, "scored", counted)
    monkeypatch.setattr(Search, "under", found)
    every = priced.run(8)
    num_priced.clear()
    result = with_sequence(priced, SearchResult(fits=(), too_large=every.fits, rejected=()))
    assert result is not None
    best = result[1].fits[0]
    assert best.search is made[0]
    assert best == made[0].score(best.candidate)
    assert num_priced[1:2] == [len(result[1].fits) if cuts_more else 0]
