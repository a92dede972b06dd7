"""How training is going: steps, loss, speed, memory and time left, on rank 0."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sized
from types import TracebackType
from typing import Any, Protocol, TextIO, cast

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_parallel import ParallelPlan

from ._progress_display import Display, Report, display_for


class ScalarWriter(Protocol):
    """TensorBoard's ``SummaryWriter``, or whatever takes scalars as it does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""
        ...


class Run(Protocol):
    """A run of Weights & Biases, or whatever logs dicts as it does."""

    def log(self, data: dict[str, Any], step: int) -> object:
        """Write several numbers."""
        ...


class Progress:
    """Reports how training is going; only rank 0 prints and writes.

    Call :meth:`step` once after every optimizer step, on every rank. The loss is read from the
    device at reports only, so that the steps between are not held up. In a terminal, with rich
    installed, there is a bar; elsewhere there is a line a report.

    Args:
        plan: What the model runs under. What it predicts of a batch (samples, tokens, flops) is
            used if it was made with an ``example_batch``.
        total: Steps in all, or the loader, whose length is taken; None if that is not known.
        epochs: How many times the loader is gone through.
        step: Steps that were done before, when training resumes.
        every: Steps between two reports.
        writers: TensorBoard writers and runs of Weights & Biases to write every report to; they
            need to exist on rank 0 only.
        tokens_per_step: Of all ranks together, if the plan does not know it.
        flops_per_step: Of forward and backward of all ranks together, likewise.
        peak_flops_per_second: Of one rank's device, for the MFU; by default that of the GPU that
            the plan was made for, if this is one.
        file: Where lines go, by default standard error.
        clock: Returns seconds.

    Example:
        >>> with Progress(ParallelPlan(), 2, every=1, file=sys.stdout) as progress:
        ...     progress.step(0.5)  # doctest: +ELLIPSIS
        step 1/2  loss 0.5  ...
    """

    def __init__(
        self,
        plan: ParallelPlan | None = None,
        total: int | Iterable[Any] | None = None,
        *,
        epochs: int = 1,
        step: int = 0,
        every: int = 10,
        writers: Iterable[ScalarWriter | Run] = (),
        tokens_per_step: int | None = None,
        flops_per_step: float | None = None,
        peak_flops_per_second: float | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 1:
            raise ValueError(f"expected every to be a positive integer, got {every!r}")
        estimate = None if plan is None else plan.estimate
        known = None if estimate is None or estimate.is_assumed else estimate
        self._samples = None if known is None else known.samples
        self._tokens = tokens_per_step or (None if known is None else known.tokens)
        self._flops = flops_per_step or (None if known is None else known.flops)
        self._peak = peak_flops_per_second or peak_of_this_device(plan)
        self._total, self._every, self._step = _steps_of(total, epochs), every, step
        self._clock, self._is_first = clock, _is_rank_0()
        self._writers = tuple(writers) if self._is_first else ()
        self._display: Display | None = None
        if self._is_first:
            self._display = display_for(file or sys.stderr, self._total, step)
        self._begin, self._last_step, self._counted = clock(), step, 0

    def step(
        self, loss: Tensor | float | None = None, *, tokens: int | None = None, **metrics: Any
    ) -> None:
        """Note that an optimizer step is done. Every rank calls this.

        Args:
            loss: Of the step; read at reports only.
            tokens: Of this step over all ranks, where batches are not alike.
            **metrics: Other numbers to report, ``lr`` or ``grad_norm`` for example: numbers, or
                tensors of one element, which are read at reports only.
        """
        self._step += 1
        self._counted += tokens or self._tokens or 0
        is_due = (self._step - self._last_step) % self._every == 0 or self._step == self._total
        if is_due:
            given = {"loss": loss, **metrics}
            found = {name: self._read(value) for name, value in given.items()}
            self._report({name: value for name, value in found.items() if value is not None})
        elif self._display is not None:
            self._display.advance(self._step)

    def close(self) -> None:
        """End the report; writers stay open, they are the caller's."""
        if self._display is not None:
            self._display.close()
            self._display = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, value: Any) -> float | None:
        # All ranks take part in reading a distributed tensor.
        if value is None or not (self._is_first or isinstance(value, DTensor)):
            return None
        return float(value.detach() if isinstance(value, Tensor) else value)

    def _report(self, values: dict[str, float]) -> None:
        now = self._clock()
        steps, seconds = self._step - self._last_step, now - self._begin
        self._begin, self._last_step, tokens = now, self._step, self._counted
        self._counted = 0
        if not self._is_first or seconds <= 0:
            return
        a_step = seconds / steps
        report = Report(
            step=self._step,
            total=self._total,
            values=values,
            seconds_per_step=a_step,
            samples_per_second=None if self._samples is None else self._samples / a_step,
            tokens_per_second=tokens / seconds if tokens else None,
            mfu=self._mfu(a_step),
            memory_bytes=_memory_bytes(),
            seconds_left=None if self._total is None else (self._total - self._step) * a_step,
        )
        if self._display is not None:
            self._display.show(report)
        for writer in self._writers:
            _write(writer, report)

    def _mfu(self, seconds: float) -> float | None:
        if not self._flops or not self._peak:
            return None
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return self._flops / (seconds * world_size * self._peak)


def _write(writer: ScalarWriter | Run, report: Report) -> None:
    scalars = report.scalars()
    if hasattr(writer, "add_scalar"):
        for name, value in scalars.items():
            cast(ScalarWriter, writer).add_scalar(name, value, report.step)
    else:
        cast(Run, writer).log(scalars, step=report.step)


def _steps_of(total: int | Iterable[Any] | None, epochs: int) -> int | None:
    if total is None or isinstance(total, int):
        return total
    # Streams have no length, and some loaders say so by an error.
    try:
        return len(cast(Sized, total)) * epochs
    except TypeError:
        return None


def _is_rank_0() -> bool:
    if dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def peak_of_this_device(plan: ParallelPlan | None) -> float | None:
    """Return the peak of the GPU that a plan was made for, None on other devices."""
    estimate = None if plan is None else plan.estimate
    if estimate is None or not estimate.device or not torch.cuda.is_available():
        return None
    is_this = estimate.device in torch.cuda.get_device_name().lower()
    return estimate.peak_flops_per_second if is_this else None


def _memory_bytes() -> int:
    """Return the most memory that this rank has taken: of its GPU, or of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
