"""Where reports are shown: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known after some steps; None where it is not.

    Attributes:
        step: The last step that is done.
        total: How many there will be.
        values: Loss and other numbers, by name.
        seconds_per_step: Mean since the report before, as all rates are.
        samples_per_second: Over all ranks.
        tokens_per_second: Over all ranks.
        mfu: Share of the devices' peak that the model's own flops use.
        memory_bytes: The most that rank 0 has taken.
        seconds_left: If steps go on to take as long.
    """

    step: int
    total: int | None
    values: Mapping[str, float]
    seconds_per_step: float
    samples_per_second: float | None
    tokens_per_second: float | None
    mfu: float | None
    memory_bytes: int
    seconds_left: float | None

    def scalars(self) -> dict[str, float]:
        """Return all numbers by name, for writers."""
        rates = {
            "seconds_per_step": self.seconds_per_step,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "memory_gib": self.memory_bytes / 2**30,
        }
        return {**self.values, **{k: v for k, v in rates.items() if v is not None}}

    def words(self) -> list[str]:
        """Return everything but the step, for people."""
        said = [f"{name} {value:.4g}" for name, value in self.values.items()]
        if self.tokens_per_second is not None:
            said.append(f"{self.tokens_per_second:,.0f} tokens/s")
        elif self.samples_per_second is not None:
            said.append(f"{self.samples_per_second:,.1f} samples/s")
        if self.mfu is not None:
            said.append(f"MFU {self.mfu:.1%}")
        said.append(f"{self.seconds_per_step:.3g} s a step")
        said.append(f"{self.memory_bytes / 2**30:.1f} GiB")
        if self.seconds_left is not None:
            said.append(f"ETA {timedelta(seconds=round(self.seconds_left))}")
        return said


class Display(Protocol):
    """What shows reports."""

    def advance(self, step: int) -> None:
        """Show that a step is done of which there is no report."""
        ...

    def show(self, report: Report) -> None:
        """Show a report."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Lines:
    """A line for every report."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def advance(self, step: int) -> None:
        """Nothing: steps without a report have no line."""

    def show(self, report: Report) -> None:
        """Print the line."""
        of = "" if report.total is None else f"/{report.total}"
        print("  ".join([f"step {report.step}{of}", *report.words()]), file=self._file, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """rich's progress bar, with the newest report behind it."""

    def __init__(self, file: TextIO, total: int | None, step: int) -> None:
        progress: Any = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console").Console(file=file)
        self._bar: Any = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._bar.add_task("", total=total, completed=step)
        self._bar.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def show(self, report: Report) -> None:
        """Move the bar, and show the report."""
        self._bar.update(self._task, completed=report.step, description="  ".join(report.words()))

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


def display_for(file: TextIO, total: int | None, step: int) -> Display:
    """Return a bar for a terminal if rich is installed, lines for all else."""
    if file.isatty() and importlib.util.find_spec("rich") is not None:
        return Bar(file, total, step)
    return Lines(file)
