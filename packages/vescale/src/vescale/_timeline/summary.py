"""What a step was spent on, over all ranks, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .span import Lane, Span

_NUM_MODULES_SHOWN = 10
_WAITS = ("wait for", "receive")
_CHECKPOINTS = ("save checkpoint", "load checkpoint")


@dataclass(frozen=True, kw_only=True)
class AxisTime:
    """Communication along one axis of the mesh, in a step, as the mean over ranks.

    Attributes:
        axis: As in ``plan.axes``; two that act as one group are joined by ``+``.
        calls: Collectives and sends.
        nbytes: Sent by a rank to others.
        exposed_seconds: In which the program did nothing else: until the transfer was done, the
            wait for ranks that came later included.
        most_exposed_seconds: The same of the rank that has most of it.
    """

    axis: str
    calls: float
    nbytes: float
    exposed_seconds: float
    most_exposed_seconds: float


@dataclass(frozen=True, kw_only=True)
class ModuleTime:
    """Seconds of a module in a step, with what it contains, as the mean over ranks that run it.

    Attributes:
        module: Fully qualified name.
        forward: Of all of its calls in forward.
        backward: Likewise, recomputation included.
        recompute: Of running it again in backward.
    """

    module: str
    forward: float
    backward: float
    recompute: float


@dataclass(frozen=True, kw_only=True)
class TimelineSummary:
    """What the steps of a timeline were spent on; printed, it is a table.

    Where no step of an optimizer was seen, ``steps`` is 0 and seconds are those of the whole.

    Attributes:
        num_ranks: Of the world.
        steps: Of the optimizer.
        seconds_per_step: From the first span to the end of the last optimizer step, without
            checkpoints; of the slowest rank.
        phases: Seconds by name, as the mean over ranks: ``"forward"``, ``"backward"``,
            ``"pipeline"``, ``"reduce gradients"``, ``"optimizer"``, ``"load data"``; of
            checkpoints those of all steps together.
        axes: Communication.
        modules: In the order of their first pass.
        bubble: Share of a pipeline's time in which a rank computes no micro-batch, as the mean
            over ranks; None without a pipeline.
        tokens_per_second: Of all ranks together; None if nobody said how many a step has.
        mfu: Share of the devices' peak that the model's own flops use; None likewise.
        clock_error_seconds: What clocks of ranks may be off from each other at most.
        num_spans: Of all ranks.
    """

    num_ranks: int
    steps: int
    seconds_per_step: float
    phases: Mapping[str, float]
    axes: tuple[AxisTime, ...]
    modules: tuple[ModuleTime, ...]
    bubble: float | None
    tokens_per_second: float | None
    mfu: float | None
    clock_error_seconds: float
    num_spans: int

    def __str__(self) -> str:
        facts = [
            f"{self.num_ranks} ranks, {self.steps} steps, {self.seconds_per_step:.4g} s a step"
        ]
        facts += [] if self.bubble is None else [f"bubble {self.bubble:.1%}"]
        rate = self.tokens_per_second
        facts += [] if rate is None else [f"{rate:,.0f} tokens/s"]
        facts += [] if self.mfu is None else [f"MFU {self.mfu:.1%}"]
        phases = [("phase", "s a step")]
        phases += [(name, f"{seconds:.4g}") for name, seconds in self.phases.items()]
        axes = [("axis", "calls", "bytes sent", "exposed s", "at most")]
        axes += [
            (
                each.axis,
                f"{each.calls:,.4g}",
                f"{each.nbytes:,.0f}",
                f"{each.exposed_seconds:.4g}",
                f"{each.most_exposed_seconds:.4g}",
            )
            for each in self.axes
        ]
        slowest = sorted(self.modules, key=lambda each: -(each.forward + each.backward))
        modules = [("module", "forward s", "backward s", "of it again")]
        modules += [
            (each.module, f"{each.forward:.4g}", f"{each.backward:.4g}", f"{each.recompute:.4g}")
            for each in slowest[:_NUM_MODULES_SHOWN]
        ]
        tables = [table for table in (phases, axes, modules) if len(table) > 1]
        return "\n\n".join([", ".join(facts), *map(_aligned, tables)])


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """What one rank's spans add up to; seconds of all steps together."""

    steps: int
    seconds: float
    phases: Mapping[str, float]
    axes: Mapping[str, tuple[int, int, float]]
    modules: Mapping[str, tuple[float, float, float]]
    slots: float
    clock_error: float
    num_spans: int


def totals_of(spans: Sequence[Span], clock_error: float) -> RankTotals:
    """Add up the spans of one rank."""
    phases = _outermost(spans, "phases")
    steps, last_end = 0, None
    before = ""
    for span in phases:
        if span.name == "optimizer":
            steps += before != "optimizer"  # several optimizers step one after the other
            last_end = span.end
        before = span.name
    begin = min((span.begin for span in spans), default=0)
    end = max((span.end for span in spans), default=0) if last_end is None else last_end
    aside = sum(s.end - s.begin for s in phases if s.name in _CHECKPOINTS and s.end <= end)
    by_phase: dict[str, float] = {}
    for span in phases:
        by_phase[span.name] = by_phase.get(span.name, 0.0) + span.seconds
    return RankTotals(
        steps=steps,
        seconds=(end - begin - aside) / 1e9,
        phases=by_phase,
        axes=_axes(spans),
        modules=_modules(spans),
        slots=sum(span.seconds for span in _outermost(spans, "pipeline")),
        clock_error=clock_error,
        num_spans=len(spans),
    )


def summarize(
    ranks: Sequence[RankTotals],
    *,
    tokens_per_step: int | None,
    flops_per_step: float | None,
    peak_flops_per_second: float | None,
) -> TimelineSummary:
    """Put the totals of all ranks together."""
    steps = max(each.steps for each in ranks)
    a_step = max(each.seconds for each in ranks) / max(steps, 1)
    is_timed = steps > 0 and a_step > 0
    peak = (peak_flops_per_second or 0) * len(ranks)
    return TimelineSummary(
        num_ranks=len(ranks),
        steps=steps,
        seconds_per_step=a_step,
        phases=_mean_phases(ranks, max(steps, 1)),
        axes=_mean_axes(ranks, max(steps, 1)),
        modules=_mean_modules(ranks, max(steps, 1)),
        bubble=_bubble(ranks),
        tokens_per_second=tokens_per_step / a_step if tokens_per_step and is_timed else None,
        mfu=flops_per_step / (a_step * peak) if flops_per_step and peak and is_timed else None,
        clock_error_seconds=max(each.clock_error for each in ranks),
        num_spans=sum(each.num_spans for each in ranks),
    )


def _outermost(spans: Iterable[Span], lane: Lane) -> list[Span]:
    found: list[Span] = []
    own = sorted((s for s in spans if s.lane == lane), key=lambda span: (span.begin, -span.end))
    for span in own:
        if not found or span.begin >= found[-1].end:
            found.append(span)
    return found


def _axes(spans: Sequence[Span]) -> dict[str, tuple[int, int, float]]:
    exposed: dict[str, float] = {}
    for span in _outermost(spans, "communication"):
        exposed[span.axis] = exposed.get(span.axis, 0.0) + span.seconds
    found: dict[str, tuple[int, int, float]] = {}
    for span in spans:
        if span.axis:
            calls, nbytes, _ = found.get(span.axis, (0, 0, 0.0))
            calls += not span.kind.startswith(_WAITS)
            found[span.axis] = calls, nbytes + span.nbytes, exposed.get(span.axis, 0.0)
    return found


def _modules(spans: Sequence[Span]) -> dict[str, tuple[float, float, float]]:
    found: dict[str, dict[str, float]] = {}
    for span in sorted((s for s in spans if s.lane == "modules"), key=lambda span: span.begin):
        seconds = found.setdefault(span.name, {"forward": 0.0, "backward": 0.0, "recompute": 0.0})
        seconds[span.kind] += span.seconds
    return {name: (s["forward"], s["backward"], s["recompute"]) for name, s in found.items()}


def _mean_phases(ranks: Sequence[RankTotals], steps: int) -> dict[str, float]:
    names = dict.fromkeys(name for each in ranks for name in each.phases)
    means = {name: fmean(each.phases.get(name, 0.0) for each in ranks) for name in names}
    return {name: mean if name in _CHECKPOINTS else mean / steps for name, mean in means.items()}


def _mean_axes(ranks: Sequence[RankTotals], steps: int) -> tuple[AxisTime, ...]:
    found: list[AxisTime] = []
    for axis in sorted({axis for each in ranks for axis in each.axes}):
        own = [each.axes.get(axis, (0, 0, 0.0)) for each in ranks]
        calls, nbytes, seconds = zip(*own, strict=True)
        found.append(
            AxisTime(
                axis=axis,
                calls=fmean(calls) / steps,
                nbytes=fmean(nbytes) / steps,
                exposed_seconds=fmean(seconds) / steps,
                most_exposed_seconds=max(seconds) / steps,
            )
        )
    return tuple(found)


def _mean_modules(ranks: Sequence[RankTotals], steps: int) -> tuple[ModuleTime, ...]:
    found: list[ModuleTime] = []
    for name in dict.fromkeys(name for each in ranks for name in each.modules):
        own = [each.modules[name] for each in ranks if name in each.modules]
        forward, backward, again = (fmean(values) / steps for values in zip(*own, strict=True))
        found.append(ModuleTime(module=name, forward=forward, backward=backward, recompute=again))
    return tuple(found)


def _bubble(ranks: Sequence[RankTotals]) -> float | None:
    shares = [
        1 - each.slots / each.phases["pipeline"]
        for each in ranks
        if each.phases.get("pipeline", 0.0) > 0
    ]
    return fmean(shares) if shares else None


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
