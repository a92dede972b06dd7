"""Record what every rank does while a training loop runs, on one clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch.distributed as dist
from torch import nn

from vescale._progress import peak_of_this_device
from vescale_dtensor import named_failures
from vescale_parallel import ParallelPlan, mesh_coordinate

from .clocks import ClockReading, read_clocks, to_rank_0
from .modules import Granularity, watched_modules
from .recorder import Recorder, shifted
from .span import Span as Span
from .summary import TimelineSummary, summarize, totals_of
from .trace import write_trace


class Timeline:
    """What :func:`timeline` recorded, once its block has ended; printed, it is its summary.

    Attributes:
        spans: Of this rank, in the order in which they began, in nanoseconds of rank 0's clock.
        clock: How far this rank's clock was ahead of rank 0's, and what that may be off.
    """

    def __init__(self) -> None:
        self.spans: tuple[Span, ...] = ()
        self.clock = ClockReading(0, 0, 0)
        self._summary: TimelineSummary | None = None

    @property
    def summary(self) -> TimelineSummary:
        """What steps were spent on, over all ranks; the same on every rank.

        Raises:
            RuntimeError: Before the end of the block, or if it ended by an error.
        """
        if self._summary is None:
            raise RuntimeError(
                "a timeline has its summary once its block has ended without an error: read it "
                "behind `with vescale.timeline(model) as timeline:`"
            )
        return self._summary

    def __str__(self) -> str:
        return str(self.summary)

    def _close(self, spans: Sequence[Span], clock: ClockReading) -> None:
        self.spans, self.clock = tuple(spans), clock

    def _conclude(self, summary: TimelineSummary) -> None:
        self._summary = summary


@contextmanager
def timeline(
    model: nn.Module,
    path: str | os.PathLike[str] | None = None,
    *,
    plan: ParallelPlan | None = None,
    modules: Granularity = "blocks",
    tokens_per_step: int | None = None,
    flops_per_step: float | None = None,
    peak_flops_per_second: float | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Iterator[Timeline]:
    """Record what every rank does in the block, around an ordinary training loop.

    Forward and backward of modules, every collective by its axis with its bytes, what stages do
    with which micro-batch, the optimizer's steps, batches from the loader, checkpoints. Every rank
    must begin and end the block: that compares their clocks, and adds up what they did. Nothing
    else is communicated, no number changes, and nothing stays behind. Times are the host's: on a
    GPU they are those of launching and of waiting; ``torch.profiler`` around the same block shows
    ranges of the same names on the device. The first step of a model has checks of its own; begin
    behind it.

    Args:
        model: What :func:`vescale.parallelize` returned.
        path: Where rank 0 writes the trace of all ranks, as JSON that https://ui.perfetto.dev and
            chrome://tracing open; rank 0's counts. None for no file.
        plan: What the model runs under, if it was made with an ``example_batch``: it knows tokens
            and flops of a step.
        modules: ``"blocks"``: repeated blocks, and what is around them. ``"all"``: every module.
            Those that were compiled are left out, with what is in them.
        tokens_per_step: Of all ranks together, if the plan does not know it.
        flops_per_step: Of forward and backward of all ranks together, likewise.
        peak_flops_per_second: Of one rank's device, for the MFU; by default that of the GPU that
            the plan was made for, if this is one.
        clock: Returns nanoseconds.

    Yields:
        A :class:`Timeline`, whose spans and summary are there when the block has ended.

    Raises:
        TypeError: If the model is not parallelized.
        ValueError: If ``modules`` is something else.

    Example:
        >>> import torch, vescale
        >>> model, optimizer = vescale.parallelize(
        ...     vescale.ParallelPlan(), torch.nn.Linear(4, 1), torch.optim.SGD
        ... )
        >>> with vescale.timeline(model) as timeline:
        ...     model(torch.ones(2, 4)).mean().backward()
        ...     optimizer.step()
        >>> timeline.summary.steps, [*timeline.summary.phases]
        (1, ['forward', 'backward', 'reduce gradients', 'optimizer'])
    """
    name = _name_of_rank(model)
    if modules not in get_args(Granularity):
        raise ValueError(f"expected modules to be 'blocks' or 'all', got {modules!r}")
    estimate = None if plan is None or plan.estimate is None else plan.estimate
    known = None if estimate is None or estimate.is_assumed else estimate
    found, recorder = Timeline(), Recorder(clock)
    first = read_clocks(clock)
    try:
        with recorder.opened(), watched_modules(model, recorder, modules):
            yield found
    except BaseException:
        # The others need not come to a collective now.
        found._close(_on_clock_of_rank_0(recorder, first, first), first)
        raise
    last = read_clocks(clock)
    found._close(_on_clock_of_rank_0(recorder, first, last), last)
    totals = totals_of(found.spans, max(first.error, last.error) / 1e9)
    everyone = _of_every_rank((name, path is not None, totals))
    names, are_written, everyones = zip(*everyone, strict=True)
    if are_written[0]:
        spans = _at_rank_0(found.spans)
        if spans and path is not None:
            write_trace(Path(path), spans, names)
    found._conclude(
        summarize(
            everyones,
            tokens_per_step=tokens_per_step or (None if known is None else known.tokens),
            flops_per_step=flops_per_step or (None if known is None else known.flops),
            peak_flops_per_second=peak_flops_per_second or peak_of_this_device(plan),
        )
    )


def _name_of_rank(model: nn.Module) -> str:
    place = ", ".join(f"{axis} {at}" for axis, at in mesh_coordinate(model).items())
    return f"rank {dist.get_rank()} ({place})"


def _on_clock_of_rank_0(recorder: Recorder, first: ClockReading, last: ClockReading) -> list[Span]:
    shift = to_rank_0(first, last)
    spans = [shifted(span, shift) for span in recorder.spans]
    return sorted(spans, key=lambda span: (span.begin, -span.end))


T = TypeVar("T")


def _of_every_rank(own: T) -> list[T]:
    found: list[Any] = [None] * dist.get_world_size()
    with named_failures():
        dist.all_gather_object(found, own)
    return found


def _at_rank_0(own: T) -> list[T]:
    """Return what each rank gave, on rank 0; nothing on the others."""
    is_first = dist.get_rank() == 0
    found: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    with named_failures():
        dist.gather_object(own, found)
    return found or []
