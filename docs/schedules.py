"""Draw ``docs/concepts/schedule-*.svg``: the schedules of a pipeline beside each other."""

from __future__ import annotations

from pathlib import Path

from vescale_parallel import ParallelPlan, draw_schedule, with_constraints

SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 1, "zbv": 2}


def main() -> None:
    """Write one picture for each schedule."""
    for schedule, virtual_stages in SCHEDULES.items():
        section = {
            "size": 4,
            "microbatches": 8,
            "schedule": schedule,
            "virtual_stages": virtual_stages,
        }
        plan = with_constraints(
            ParallelPlan(), {f"pipeline_parallel.{key}": value for key, value in section.items()}
        )
        path = Path(__file__).parent / "concepts" / f"schedule-{schedule}.svg"
        path.write_text(draw_schedule(plan), encoding="utf-8")


if __name__ == "__main__":
    main()
