"""What a timeline records of training, on ranks: spans, bytes, clocks, and nothing when off."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

import vescale
from vescale import Span, TimelineSummary
from vescale_dtensor import CommCounter
from vescale_parallel import with_constraints
from vescale_testing import World

from .models import build
from .plans import CP, DP, PARTS, PP, SCHEDULE, SEQUENCE, TP, VIRTUAL, ZERO, Constraints
from .training import ROWS, samples, whole

STEPS = 2  # that are recorded, behind one that is not

PLANS: dict[str, tuple[str, Constraints]] = {
    "zero3": ("llama", {DP: 2, ZERO: 3}),
    "zero1": ("hand_written", {DP: 2, ZERO: 1}),
    "tp": ("llama", {TP: 2, SEQUENCE: True}),
    "tp-overlap": ("llama", {TP: 2, "tensor_parallel.overlap": 2}),
    "cp": ("llama", {CP: 2}),
    "pp": ("hand_written", {PP: 2, PARTS: 4}),
    "recompute": ("llama", {DP: 2, "recompute": "full"}),
    "accumulated": ("llama", {DP: 2, "batch.gradient_accumulation": 2}),
    "zbv": ("llama", {PP: 2, PARTS: 4, SCHEDULE: "zbv", VIRTUAL: 2}),
    "pp-interleaved": ("llama", {PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2}),
}  # fmt: skip
FOUR: dict[str, tuple[str, Constraints]] = {
    "pp-tp": ("llama", {PP: 2, PARTS: 2, TP: 2}),
    "tp-zero3": ("llama", {TP: 2, DP: 2, ZERO: 3}),
}


@dataclass
class Seen:
    """What one rank has seen of a run."""

    losses: list[float]
    parameters: dict[str, Tensor]
    modules: set[str]
    spans: tuple[Span, ...]
    counted: Counter[tuple[str, str]]
    nbytes: int
    text: str
    summary: TimelineSummary | None


def train(name: str, constraints: Constraints, path: str = "", modules: Any = "blocks") -> Seen:
    """Train; with a path, record all but the first step."""
    torch.manual_seed(0)
    model = build(name)
    plan = with_constraints(vescale.ParallelPlan(), {"batch.global_size": ROWS, **constraints})
    model, optimizer, loader = vescale.parallelize(
        plan, model, lambda m: AdamW(m.parameters(), lr=1e-2), None, samples(STEPS + 1)
    )
    losses: list[float] = []

    def step(batch: Any) -> None:
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    batches = iter(loader)
    step(next(batches))
    timeline = None
    with contextlib.ExitStack() as stack:
        if path:
            timeline = stack.enter_context(
                vescale.timeline(model, path, modules=modules, tokens_per_step=96)
            )
        counter = stack.enter_context(CommCounter())
        for batch in batches:
            step(batch)
    return Seen(
        losses=losses,
        parameters={fqn: whole(p).clone() for fqn, p in model.named_parameters()},
        modules={name for name, _ in model.named_modules()},
        spans=timeline.spans if timeline else (),
        counted=Counter((event.kind, event.over) for event in counter.events),
        nbytes=sum(event.nbytes for event in counter.events),
        text=str(timeline) if timeline else "",
        summary=timeline.summary if timeline else None,
    )


def assert_nested(spans: list[Span]) -> None:
    """Two spans of a lane are apart, or one is within the other."""
    inside: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.begin, -each.end)):
        assert span.begin <= span.end
        while inside and inside[-1].end <= span.begin:
            inside.pop()
        assert not inside or span.end <= inside[-1].end, (inside[-1], span)
        inside.append(span)


def check(seen: Seen, plain: Seen) -> None:
    assert seen.losses == plain.losses
    for fqn, parameter in plain.parameters.items():
        assert torch.equal(seen.parameters[fqn], parameter), fqn
    for lane in {span.lane for span in seen.spans}:
        assert_nested([span for span in seen.spans if span.lane == lane])
    communication = [span for span in seen.spans if span.lane.startswith("communication")]
    waits = ("wait for", "receive", "send", "move")
    collectives = [span for span in communication if not span.kind.startswith(waits)]
    assert Counter((span.kind, span.axis) for span in collectives) == seen.counted
    assert sum(span.nbytes for span in collectives) == seen.nbytes
    passes = [span for span in seen.spans if span.lane == "modules"]
    assert {span.name for span in passes} <= seen.modules
    kinds = Counter((span.name, span.kind) for span in passes)
    blocks = {name for name, _ in kinds if name.split(".")[-1].isdigit()}
    assert blocks
    for block in blocks:
        assert kinds[block, "forward"] == kinds[block, "backward"] >= STEPS, (block, kinds)
    assert seen.summary is not None
    assert seen.summary.steps == STEPS
    phases = Counter(span.name for span in seen.spans if span.lane == "phases")
    assert phases["optimizer"] == STEPS
    assert phases["load data"] >= STEPS


def check_run(
    world: World, name: str, constraints: Constraints, path: Path, modules: str = "blocks"
) -> list[Seen]:
    plain = world.run(train, name, constraints)
    seen = world.run(train, name, constraints, str(path), modules)
    for own, other in zip(seen, plain, strict=True):
        check(own, other)
        assert own.text == seen[0].text
        assert own.summary == seen[0].summary
    trace = json.loads(path.read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert Counter(event["pid"] for event in complete) == {
        rank: len(own.spans) for rank, own in enumerate(seen)
    }
    assert min(event["ts"] for event in complete) == 0
    return seen


@pytest.mark.by_day("cp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "tp", "cp", "pp", "recompute"])
def test_spans_are_what_was_counted_and_change_no_bit(
    world2: World, tmp_path: Path, plan: str
) -> None:
    again = plan == "recompute"  # what is in a block is, with no call of the block
    seen = check_run(world2, *PLANS[plan], tmp_path / "trace.json", "all" if again else "blocks")
    assert seen[0].summary is not None
    assert (seen[0].summary.bubble is not None) == (plan == "pp")
    kinds = {span.kind for span in seen[0].spans if span.lane == "modules"}
    assert kinds == {"forward", "backward", *(["recompute"] if again else [])}


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [*PLANS, *FOUR])
def test_spans_under_more_plans(world2: World, world4: World, tmp_path: Path, plan: str) -> None:
    world, case = (world2, PLANS[plan]) if plan in PLANS else (world4, FOUR[plan])
    check_run(world, *case, tmp_path / "trace.json")


def test_stages_have_slots(world2: World, tmp_path: Path) -> None:
    for stage, seen in enumerate(world2.run(train, *PLANS["pp"], str(tmp_path / "t.json"))):
        slots = [
            (span.kind, span.stage, span.microbatch)
            for span in seen.spans
            if span.lane == "pipeline"
        ]
        expected = [(kind, stage, part) for kind in ("forward", "backward") for part in range(4)]
        assert Counter(slots) == Counter(expected * STEPS)
        assert seen.summary is not None
        assert seen.summary.bubble is not None
        assert 0 < seen.summary.bubble < 1
        sent = [span for span in seen.spans if span.kind.startswith("send")]
        assert {span.axis for span in sent} == {"pp"}
        assert all(span.nbytes > 0 for span in sent)


def test_ranks_in_one_process_have_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    seen = vescale.emulate(train, 2, args=(*PLANS["zero3"], str(path)))
    plain = vescale.emulate(train, 2, args=PLANS["zero3"])
    for own, other in zip(seen, plain, strict=True):
        check(own, other)
    assert {event["pid"] for event in json.loads(path.read_text())["traceEvents"]} == {0, 1}


def test_one_rank_has_a_timeline(world1: World, tmp_path: Path) -> None:
    (plain,) = world1.run(train, "llama", {})
    (seen,) = world1.run(train, "llama", {}, str(tmp_path / "trace.json"), "all")
    check(seen, plain)
    names = {span.name for span in seen.spans if span.lane == "modules"}
    assert any(name.endswith("mlp.down_proj") for name in names)


@dataclass
class SkewedRank:
    """What a rank whose clock is ahead has measured of that, in nanoseconds."""

    offset: int
    error: int
    begins: list[int]


def small() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model on data-parallel ranks, and this rank's batch."""
    torch.manual_seed(0)
    plan = with_constraints(vescale.ParallelPlan(), {DP: dist.get_world_size(), ZERO: 3})
    model, optimizer = vescale.parallelize(plan, build("hand_written"), AdamW)
    ids = torch.arange(24).view(2, 12) + dist.get_rank()
    return model, optimizer, {"input_ids": ids, "labels": ids}


def with_skewed_clocks(skew: int) -> SkewedRank:
    ahead = skew * dist.get_rank()
    model, optimizer, batch = small()
    with vescale.timeline(model, clock=lambda: time.perf_counter_ns() + ahead) as timeline:
        model(batch).backward()
        optimizer.step()
    begins = [span.begin for span in timeline.spans if span.name == "forward"]
    return SkewedRank(timeline.clock.offset, timeline.clock.error, begins)


def test_clocks_of_ranks_are_aligned(world4: World) -> None:
    skew = 3_600_000_000_000
    ranks = world4.run(with_skewed_clocks, skew)
    for rank, seen in enumerate(ranks):
        # All ranks of one machine read one clock, so what they are off is known.
        assert abs(seen.offset - rank * skew) <= seen.error
        assert seen.error < skew / 1000
        assert abs(seen.begins[0] - ranks[0].begins[0]) < skew / 1000


def calls_of_timelines() -> tuple[int, int, bool]:
    """Return the calls of timelines in a step with one and in one without, and what is left."""
    model, optimizer, batch = small()

    def step() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def counted() -> int:
        calls = 0

        def profile(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            tells = file.endswith("/_comm/events.py") and name == "tell"
            calls += event == "call" and ("/_timeline/" in file or tells)

        sys.setprofile(profile)
        try:
            step()
        finally:
            sys.setprofile(None)
        return calls

    def attributes() -> list[Any]:
        return [
            (name, sorted(vars(module)), [len(hooks) for hooks in hooks_of(module)])
            for name, module in model.named_modules()
        ]

    step()
    before = attributes()
    with vescale.timeline(model):
        during = counted()
        assert attributes() != before
    after = counted()
    return during, after, attributes() == before


def hooks_of(module: nn.Module) -> list[Any]:
    return [value for name, value in sorted(vars(module).items()) if name.endswith("hooks")]


def test_nothing_is_left_and_nothing_runs_without_a_timeline(world2: World) -> None:
    for during, after, is_as_before in world2.run(calls_of_timelines):
        assert during > 0
        assert after == 0
        assert is_as_before


def fails_inside(model: nn.Module, timelines: list[vescale.Timeline]) -> None:
    with vescale.timeline(model, "never.json") as timeline:
        timelines.append(timeline)
        model(torch.ones(2, 4)).mean().backward()
        raise KeyError


def wrongly() -> None:
    model = vescale.parallelize(vescale.ParallelPlan(), nn.Linear(4, 1))
    with pytest.raises(TypeError, match="expected the model that parallelize returned"):
        vescale.timeline(nn.Linear(4, 1)).__enter__()
    with pytest.raises(ValueError, match="expected modules to be 'blocks' or 'all', got 'layers'"):
        vescale.timeline(model, modules="layers").__enter__()  # pyright: ignore[reportArgumentType]
    with (
        pytest.raises(RuntimeError, match="once its block has ended"),
        vescale.timeline(model) as t,
    ):
        str(t)
    timelines: list[vescale.Timeline] = []
    with pytest.raises(KeyError):
        fails_inside(model, timelines)
    assert {span.name for span in timelines[0].spans} >= {"forward", "backward"}
    assert not Path("never.json").exists()


def test_what_a_timeline_refuses(world1: World) -> None:
    world1.run(wrongly)
