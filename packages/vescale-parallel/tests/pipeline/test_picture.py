"""A Gantt chart of a plan's schedule."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from vescale_parallel import ParallelPlan, draw_schedule, with_constraints
from vescale_parallel._pipeline.schedules.simulator import simulate_schedule


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
