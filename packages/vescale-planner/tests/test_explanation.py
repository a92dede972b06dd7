"""What is said of a choice adds up, and its page is whole by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import ParallelPlan, PipelineParallel
from vescale_planner import Cluster, Explanation, explain_plan, generate_plan

CPU = Cluster.preset("cpu")


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


BATCH = torch.ones(8, 64)
PIPELINE = {
    "pipeline_parallel.size": 2,
    "pipeline_parallel.microbatches": 16,
    "batch.global_size": 32,
}


class _Page(HTMLParser):
    """Hears tags that are not closed, and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.pictures += tag == "svg"
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def found() -> Explanation:
    return explain_plan(Net(), PIPELINE, world_size=4, cluster=CPU, example_batch=BATCH)


def test_it_is_the_plan_of_the_planner_and_its_numbers(found: Explanation) -> None:
    plan = generate_plan(Net(), PIPELINE, world_size=4, cluster=CPU, example_batch=BATCH)
    assert found.plan == plan
    assert plan.estimate is not None
    assert found.prediction.step_seconds == plan.estimate.step_seconds
    assert found.prediction.breakdown.total == pytest.approx(found.prediction.step_seconds)
    assert found.prediction.memory_bytes == pytest.approx(plan.estimate.memory_bytes, abs=2)
    assert found.memory_limit_bytes == CPU.memory_bytes
    assert len(found.stages) == 2
    assert (found.stages[0][0], found.stages[1][1]) == ("layers.0", "layers.7")


def test_the_next_ones_say_what_they_lose() -> None:
    given = {"batch.global_size": 64}
    found = explain_plan(Net(), given, world_size=8, cluster=CPU, example_batch=BATCH)
    assert 1 < len(found.alternatives) <= 10
    times = [each.times for each in found.alternatives]
    assert times == sorted(times)
    # Differences are signed parts of the choice's step.
    assert all("%" in each.loses or "nothing" in each.loses for each in found.alternatives)
    pairs = list(found.front)
    assert pairs == sorted(pairs)
    assert [m for _, m in pairs] == sorted((m for _, m in pairs), reverse=True)


def test_a_small_model_is_faster_on_fewer_ranks_and_faster_links_help() -> None:
    slow = replace(CPU, intra_bytes_per_second=1e6)
    given = {"batch.global_size": 8, "data_parallel.size": 4}
    found = explain_plan(Net(), given, world_size=4, cluster=slow, example_batch=BATCH)
    changes = {each.what: each for each in found.changes}
    links = changes["links inside nodes twice as fast"].times
    assert links is not None
    assert links < 0.7
    larger = changes["twice the batch"].times
    assert larger is not None
    assert larger < 0.7
    # The size is constrained; without that one process is faster.
    assert not any("of 4 ranks" in what for what in changes)
    free = explain_plan(
        Net(), {"batch.global_size": 8}, world_size=4, cluster=slow, example_batch=BATCH
    )
    alone = {each.what: each.times for each in free.changes}["1 of 4 ranks"]
    assert alone is not None
    assert alone < 1
    assert "with 1 of 4 ranks: " in str(free)


def test_the_page_is_whole_and_loads_nothing(found: Explanation) -> None:
    page, text = _Page(), found.to_html()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    # Mesh, stages, time, memory, schedule, and time against memory.
    assert page.pictures == 6
    assert "The first 8 of 16 micro-batches." in text
    assert text.isascii()
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert ElementTree.fromstring(picture).attrib["viewBox"]


def test_what_a_model_is_called_does_not_break_the_page(found: Explanation) -> None:
    odd = replace(found, cluster='<script>"&', stages=(("a<b", "a<b"), ("c&d", "c&d")))
    page = _Page()
    page.feed(odd.to_html())
    assert page.loads == []
    assert page.open == []


def test_one_device_and_a_deep_pipeline_have_pages_too(found: Explanation) -> None:
    alone = explain_plan(nn.Linear(8, 8), world_size=1, cluster="h200")
    assert alone.alternatives == ()
    page = _Page()
    page.feed(alone.to_html())
    assert page.pictures == 3
    pipeline = PipelineParallel(size=32, microbatches=64)
    deep = replace(found, plan=ParallelPlan(pipeline_parallel=pipeline))
    assert "32 ranks of a pipeline are more than a picture shows" in deep.to_html()
