"""What a training run shows while it goes on, and what is left of it: JSON, a table, a plot."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(kw_only=True)
class Curve:
    """What one run measured.

    Attributes:
        title: What people call the run.
        world_size: Its number of ranks.
        plan: Its plan in a few words.
        first_step: Steps that were done before it.
        tokens_per_step: Tokens in one step over all ranks.
        losses: Training loss of each step.
        validation: Validation loss after some of the steps.
        step_seconds: Time of each step, validation left out.
        peak_memory_bytes: Largest memory of rank 0: of its GPU, or of its process.
    """

    title: str
    world_size: int
    plan: str
    first_step: int
    tokens_per_step: int
    losses: list[float] = field(default_factory=list[float])
    validation: dict[int, float] = field(default_factory=dict[int, float])
    step_seconds: list[float] = field(default_factory=list[float])
    peak_memory_bytes: int = 0

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.losses)

    @property
    def steps(self) -> range:
        """Number of the step that each loss belongs to, from 1."""
        return range(self.first_step + 1, self.last_step + 1)

    @property
    def median_step_seconds(self) -> float:
        # The first step also warms up.
        return statistics.median(self.step_seconds[1:] or self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.median_step_seconds

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Curve:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["validation"] = {int(step): loss for step, loss in record["validation"].items()}
        return cls(**record)


class Reporter:
    """Records a run step by step; shows it live in a terminal, and as lines elsewhere.

    Every rank has one and calls it at the same steps: validation needs all of them.

    Args:
        title: What people call the run.
        plan: Its plan in a few words.
        world_size: Its number of ranks.
        first_step: Steps that were done before it.
        last_step: Where it ends.
        tokens_per_step: Tokens in one step over all ranks.
        validation_steps: Steps after which to validate.
        validate: Returns the validation loss.
    """

    def __init__(
        self,
        title: str,
        *,
        plan: str,
        world_size: int,
        first_step: int,
        last_step: int,
        tokens_per_step: int,
        validation_steps: Sequence[int],
        validate: Callable[[], float],
    ) -> None:
        self.curve = Curve(
            title=title,
            world_size=world_size,
            plan=plan,
            first_step=first_step,
            tokens_per_step=tokens_per_step,
        )
        self._last_step, self._validation_steps = last_step, validation_steps
        self._validate = validate
        self._live = sys.stdout.isatty()
        self._progress = _progress(disable=not self._live)
        self._task: TaskID | None = None
        self._started = time.perf_counter()

    def __enter__(self) -> Reporter:
        self._progress.start()
        self._task = self._progress.add_task(
            self.curve.title, total=self._last_step, completed=self.curve.first_step, facts=""
        )
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self.curve.peak_memory_bytes = _peak_memory_bytes()

    def step(self, loss: Tensor) -> int:
        """Take note of a step that is done, and return its number."""
        curve = self.curve
        curve.losses.append(loss.item())
        curve.step_seconds.append(time.perf_counter() - self._started)
        step = curve.last_step
        if step in self._validation_steps:
            curve.validation[step] = self._validate()
        if self._task is not None and self._live:
            self._progress.update(self._task, completed=step, facts=self._facts())
        elif step in self._validation_steps:
            left = (self._last_step - step) * curve.median_step_seconds
            print(
                f"step {step:4}/{self._last_step}  {self._facts()}  {left:.0f} s left", flush=True
            )
        self._started = time.perf_counter()
        return step

    def _facts(self) -> str:
        curve = self.curve
        validated = [f"val {loss:.4f}" for loss in curve.validation.values()]
        return "  ".join(
            [
                f"loss {curve.losses[-1]:.4f}",
                *validated[-1:],
                f"{curve.tokens_per_second:,.0f} tok/s",
                f"{curve.step_seconds[-1]:.2f} s",
                f"{_peak_memory_bytes() / 2**20:.0f} MiB",
            ]
        )


def _progress(*, disable: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=6),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        disable=disable,
    )


def _peak_memory_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far losses are from those of one device, relative to these.

    Attributes:
        by_step: Relative difference of each step's training or validation loss, the larger.
        largest: The largest of these.
        at_step: Where that is.
        bound: Above which the run counts as wrong.
    """

    by_step: dict[int, float]
    largest: float
    at_step: int
    bound: float

    @property
    def is_within_bound(self) -> bool:
        # A loss that is no number compares as false.
        return self.largest <= self.bound


def compare(phases: Sequence[Curve], alone: Curve, *, bound: float) -> Comparison:
    """Compare the phases with a run on one device, at every step that both have."""
    expected = dict(zip(alone.steps, alone.losses, strict=True))
    found = {
        s: loss for phase in phases for s, loss in zip(phase.steps, phase.losses, strict=True)
    }
    training = _relative(found, expected)
    validation = {step: loss for curve in phases for step, loss in curve.validation.items()}
    validated = _relative(validation, alone.validation)
    by_step = {step: max(training[step], validated.get(step, 0.0)) for step in training}
    largest, at_step = max((difference, step) for step, difference in by_step.items())
    return Comparison(by_step=by_step, largest=largest, at_step=at_step, bound=bound)


def _relative(found: Mapping[int, float], expected: Mapping[int, float]) -> dict[int, float]:
    differences = {
        step: abs(found[step] - expected[step]) / abs(expected[step]) for step in expected
    }
    # max() would let a loss that is no number pass.
    return {s: x if x == x else float("inf") for s, x in differences.items()}


def write_result(
    path: Path, phases: Sequence[Curve], alone: Curve, comparison: Comparison, **facts: Any
) -> None:
    """Write everything that was measured as JSON."""
    runs = [
        asdict(curve)
        | {
            "tokens_per_second": curve.tokens_per_second,
            "median_step_seconds": curve.median_step_seconds,
        }
        for curve in (*phases, alone)
    ]
    result = facts | {
        "steps": alone.last_step,
        "largest_relative_difference": comparison.largest,
        "at_step": comparison.at_step,
        "bound": comparison.bound,
        "passed": comparison.is_within_bound,
        "phases": runs[:-1],
        "one_device": runs[-1],
    }
    path.write_text(json.dumps(result, indent=2), encoding="utf-8")


def print_summary(curves: Sequence[Curve]) -> None:
    """Print one row for each run."""
    table = Table(box=box.SIMPLE, title="summary")
    table.add_column("run")
    table.add_column("plan")
    for name in ("ranks", "steps", "loss", "validation", "tokens/s", "step", "memory of rank 0"):
        table.add_column(name, justify="right")
    for curve in curves:
        table.add_row(
            curve.title,
            curve.plan,
            str(curve.world_size),
            f"{curve.first_step + 1}-{curve.last_step}",
            f"{curve.losses[-1]:.4f}",
            f"{curve.validation[curve.last_step]:.4f}",
            f"{curve.tokens_per_second:,.0f}",
            f"{curve.median_step_seconds:.2f} s",
            f"{curve.peak_memory_bytes / 2**20:.0f} MiB",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def plot(path: Path, phases: Sequence[Curve], alone: Curve, comparison: Comparison) -> None:
    """Draw the losses of all runs, and under them how far the phases are from one device."""
    # Here, because ranks need not load it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_losses(upper, phases, alone)
    _draw_differences(lower, comparison)
    hand_over = phases[0].last_step + 0.5
    for axes in (upper, lower):
        axes.axvline(hand_over, color="0.4", linestyle="--", linewidth=1)
        axes.grid(alpha=0.25)
    before, after = (curve.world_size for curve in phases)
    upper.annotate(
        f" checkpoint after step {phases[0].last_step}:\n {before} ranks to {after}, another plan",
        (hand_over, 0.55),
        xycoords=("data", "axes fraction"),
        color="0.3",
    )
    figure.savefig(path, dpi=120)


def _draw_losses(axes: Axes, phases: Sequence[Curve], alone: Curve) -> None:
    grey = "0.78"
    axes.plot(alone.steps, alone.losses, color=grey, linewidth=6, label="one device, torch alone")
    for curve, color in zip(phases, ("tab:blue", "tab:red"), strict=True):
        label = f"{curve.title}: {curve.world_size} ranks, {curve.plan}"
        axes.plot(curve.steps, curve.losses, color=color, linewidth=1.5, label=label)
    validation = {step: loss for curve in phases for step, loss in curve.validation.items()}
    axes.plot(
        [*alone.validation], [*alone.validation.values()], "o", color=grey, markersize=11,
        label="validation, one device",
    )  # fmt: skip
    axes.plot(
        [*validation], [*validation.values()], "o:", color="black", markersize=4, linewidth=1,
        label="validation, phases",
    )  # fmt: skip
    axes.set_title("One training run under two plans, and the same run on one device")
    axes.set_ylabel("cross-entropy (nats per byte)")
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, comparison: Comparison) -> None:
    # A difference of zero has no logarithm.
    differences = [max(difference, 1e-9) for difference in comparison.by_step.values()]
    axes.semilogy([*comparison.by_step], differences, "o-", color="tab:purple", markersize=3)
    axes.axhline(comparison.bound, color="0.4", linestyle=":")
    axes.annotate("bound", (1, comparison.bound), va="bottom", color="0.3")
    axes.set_ylim(5e-10, comparison.bound * 20)
    axes.set_ylabel("relative difference\n(0 drawn as 1e-9)")
    axes.set_xlabel("optimizer step")
