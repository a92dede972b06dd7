"""Say why a run was as fast as it was, and how far the prediction of its plan was off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from report import Curve

from vescale import ParallelPlan

# Beyond this a prediction is not one of this machine.
TOLERANCE = 0.25


def remarks(phases: Sequence[Curve], directory: Path, *, cores: int, gpus: int) -> list[str]:
    """Return sentences about the speed of the phases; each left its plan in ``directory``."""
    said: list[str] = []
    shared = [phase for phase in phases if not gpus and phase.world_size > 1]
    for phase in shared:
        ranks, has = phase.world_size, "more than" if phase.world_size > cores else "on"
        said.append(
            f"{phase.title}: {ranks} ranks are {has} the {cores} cores of this machine; they take "
            "turns, and what they send one another comes on top. It shows that the numbers are "
            "right; faster than one device are ranks that have a GPU each."
        )
    for phase, plan in zip(phases, plans_in(phases, directory), strict=True):
        if plan.estimate is not None:
            said.append(about_prediction(phase, plan.estimate.step_seconds))
    return said


def plans_in(phases: Sequence[Curve], directory: Path) -> list[ParallelPlan]:
    files = [directory / phase.title.replace(" ", "-") / "plan.json" for phase in phases]
    return [ParallelPlan.from_json(file.read_text(encoding="utf-8")) for file in files]


def about_prediction(phase: Curve, predicted_seconds: float) -> str:
    """Return whether a step took what the planner predicted."""
    measured = phase.median_step_seconds
    said = f"{phase.title}: a step was predicted to take {predicted_seconds:.2g} s, took "
    said += f"{measured:.2g} s"
    if abs(predicted_seconds - measured) <= TOLERANCE * measured:
        return f"{said}, within {TOLERANCE:.0%}"
    return (
        f"{said}: not calibrated. The planner knows this machine from its preset and not from "
        "measurements; plans are ranked by such predictions, do not go by their seconds."
    )
