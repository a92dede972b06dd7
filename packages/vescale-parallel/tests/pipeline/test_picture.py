"""A Gantt chart of a plan's schedule, and of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import (
    ParallelPlan,
    draw_schedule,
    parallelize,
    record_schedule,
    with_constraints,
)
from vescale_parallel._pipeline.schedules import actions_of
from vescale_parallel._pipeline.schedules.simulator import Span, simulate_schedule
from vescale_testing import World

PIPELINED = with_constraints(
    ParallelPlan(), {"pipeline_parallel.size": 2, "pipeline_parallel.microbatches": 4}
)


@pytest.mark.parametrize(
    ("schedule", "virtual", "kinds"), [("1f1b", 1, 2), ("zbv", 2, 3), ("dualpipev", 2, 4)]
)
def test_a_chart_has_a_box_for_every_pass(schedule: str, virtual: int, kinds: int) -> None:
    section = {"size": 2, "schedule": schedule, "virtual_stages": virtual, "microbatches": 4}
    plan = with_constraints(
        ParallelPlan(), {f"pipeline_parallel.{key}": value for key, value in section.items()}
    )
    found = simulate_schedule(schedule, size=2, virtual_stages=virtual, microbatches=4)
    drawn = ElementTree.fromstring(draw_schedule(plan))
    boxes = drawn.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == 1 + len(found.spans) + kinds
    title = drawn.findtext("{http://www.w3.org/2000/svg}title") or ""
    assert f"wait {found.bubble:.0%} of the time" in title


def test_a_chart_has_a_bar_for_every_reduction_of_a_micro_batch() -> None:
    said = {"pipeline_parallel.reduce_every": "microbatch", "data_parallel.zero_stage": 2}
    often = with_constraints(PIPELINED, {**said, "data_parallel.size": 2})
    assert draw_schedule(often).count("<line") == 2 * 4
    assert draw_schedule(PIPELINED).count("<line") == 0


def test_a_chart_is_written_as_svg_and_as_png(tmp_path: Path) -> None:
    svg = draw_schedule(PIPELINED, path=tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text() == svg == draw_schedule(PIPELINED)
    draw_schedule(PIPELINED, path=tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"expected path to end in \.svg or \.png, got 'a\.pdf'"):
        draw_schedule(PIPELINED, path="a.pdf")
    with record_schedule() as recorded:
        nn.Linear(2, 2)(torch.ones(2))
    with pytest.raises(ValueError, match="expected the passes of a pipeline, got none: record_"):
        draw_schedule(PIPELINED, spans=recorded.gather(ParallelPlan()))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"vescale-parallel\[visualize\]', or write a \.svg"):
        draw_schedule(PIPELINED, path=tmp_path / "chart.png")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def on_rank_recorded(num_steps: int) -> tuple[tuple[Span, ...], str]:
    model = parallelize(PIPELINED, Net())
    model(torch.ones(8, 4)).backward()
    with record_schedule() as recorded:
        for _ in range(num_steps):
            model(torch.ones(8, 4)).backward()
    model(torch.ones(8, 4)).backward()
    spans = recorded.gather(PIPELINED)
    return spans, draw_schedule(PIPELINED, spans=spans)


def test_a_run_is_recorded_and_drawn(world2: World) -> None:
    (spans, drawn), other = world2.run(on_rank_recorded, 2)
    assert (spans, drawn) == other, "every rank has all"
    assert min(span.start for span in spans) == 0
    for rank in range(2):
        own = [span for span in spans if span.rank == rank]
        order = actions_of("1f1b", rank, size=2, virtual_stages=1, microbatches=4)
        assert [span.action for span in own] == [*order, *order]
        ends = [time for span in own for time in (span.start, span.end)]
        assert ends == sorted(ends), "a rank does one thing at a time"
    ran = {(span.action.kind, span.action.stage, span.action.microbatch): span for span in spans}
    for microbatch in range(4):
        # One machine, one clock: what was received was sent before.
        assert ran["F", 0, microbatch].start < ran["F", 1, microbatch].end
        assert ran["F", 0, microbatch].end <= ran["F", 1, microbatch].end
        assert ran["B", 1, microbatch].start <= ran["B", 0, microbatch].start
    root = ElementTree.fromstring(drawn)
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == 1 + len(spans) + 2
    title = root.findtext("{http://www.w3.org/2000/svg}title") or ""
    assert "4 micro-batches, a run of " in title
    assert "keep up to 2 activations" in title
