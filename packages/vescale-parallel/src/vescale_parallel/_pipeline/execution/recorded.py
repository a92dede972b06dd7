"""When this rank ran the passes of a pipeline, in a real run."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from vescale_parallel._mesh.agreement import barrier
from vescale_parallel._pipeline.schedules import Action
from vescale_parallel._pipeline.schedules.messages import Compute, Operation
from vescale_parallel._pipeline.schedules.simulator import Span
from vescale_parallel._plan.plan import ParallelPlan

from .run import watching


@dataclass(eq=False)
class RecordedSchedule:
    """What this rank ran while it was recorded; :func:`record_schedule` makes one."""

    _passes: list[tuple[Action, float, float]] = field(
        default_factory=list[tuple[Action, float, float]]
    )
    _since: float = 0.0

    def gather(self, plan: ParallelPlan) -> tuple[Span, ...]:
        """Return what the ranks of this rank's pipeline ran. Every rank must call this.

        Seconds count from when the first pass began. Ranks of one machine have one clock; those
        of machines are compared at a barrier, and so differ by what it takes ranks to leave one.

        Args:
            plan: That of the model that was recorded.

        Example:
            >>> RecordedSchedule().gather(ParallelPlan())
            ()
        """
        everyones = [("", 0.0, self._passes)]
        if dist.is_initialized():
            barrier()
            own = (platform.node(), _clock(), self._passes)
            everyones = [own] * dist.get_world_size()
            dist.all_gather_object(everyones, own)
        # Of every machine, what its first rank read at the barrier.
        zeros = {machine: now for machine, now, _ in reversed(everyones)}
        # The pipeline axis is the outermost one.
        stride = len(everyones) // plan.pipeline_parallel.size
        first = dist.get_rank() % stride if dist.is_initialized() else 0
        spans = [
            Span(rank, action, start - zeros[machine], end - zeros[machine])
            for rank, (machine, _, passes) in enumerate(everyones[first::stride])
            for action, start, end in passes
        ]
        begin = min((span.start for span in spans), default=0.0)
        return tuple(Span(s.rank, s.action, s.start - begin, s.end - begin) for s in spans)

    def begins(self) -> None:
        """Note that a step begins."""
        self._since = _clock()

    def did(self, operation: Operation) -> None:
        """Note that an operation is done: a pass has run since the one before it."""
        now = _clock()
        if isinstance(operation, Compute):
            self._passes.append((operation.action, self._since, now))
        self._since = now


@contextlib.contextmanager
def record_schedule() -> Iterator[RecordedSchedule]:
    """Record when this rank runs the passes of a pipeline, for :func:`draw_schedule`.

    A pass begins when what it needs of other ranks is there. On a GPU every pass and message is
    waited for, which slows the step.

    Example:
        >>> with record_schedule() as recorded:
        ...     pass  # loss = model(batch); loss.backward()
        >>> recorded.gather(ParallelPlan())
        ()
    """
    recorded = RecordedSchedule()
    with watching(lambda operation, *_: recorded.did(operation), recorded.begins):
        yield recorded


def _clock() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
