"""Name the module with which a spike of the loss began."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_dtensor import DTensor

from ._torch_private import FakeTensor, is_in_backward, pytree

Kind = Literal["output", "gradient"]
# Before so many steps nothing is known of what is usual.
_MIN_STEPS = 5
# What a range is wide at least, as a share of its middle: a run may be steadier than it matters.
_MIN_WIDTH = 0.02


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step whose loss left its running range, and where that began on this rank.

    Attributes:
        step: Counted from 0 within the block.
        loss: What it was.
        usual: The upper end of its range before.
        module: FQN of the first module whose norm left its range, in the order of the step; None
            if none has.
        kind: Whether that is the norm of its output or of that output's gradient.
        norm: Of it.
        usual_norm: The upper end of the norm's range before.
        rank: On which it was seen.
    """

    step: int
    loss: float
    usual: float
    module: str | None = None
    kind: Kind = "output"
    norm: float = 0.0
    usual_norm: float = 0.0
    rank: int = 0

    def __str__(self) -> str:
        said = f"step {self.step}: the loss was {self.loss:.4g}, usually up to {self.usual:.4g}"
        if self.module is None:
            return f"{said}; no norm of a module on rank {self.rank} left its range"
        of = "" if self.kind == "output" else "gradient of the "
        return (
            f"{said}; the {of}output of {self.module or 'the model'!r} was the first to leave its "
            f"range on rank {self.rank}: norm {self.norm:.4g}, usually up to {self.usual_norm:.4g}"
        )


class SpikeWatch:
    """Ranges of a loss and of norms; see :func:`detect_spikes`.

    Attributes:
        spikes: Those seen.
    """

    def __init__(self, window: int, deviations: float) -> None:
        self.spikes: list[Spike] = []
        self._window, self._deviations = window, deviations
        self._losses: deque[float] = deque(maxlen=window)
        self._histories: dict[tuple[str, Kind], deque[float]] = {}
        # Sums of squares of this step, on the device, in the order of the step.
        self._squares: dict[tuple[str, Kind], Tensor] = {}
        self._num_steps = 0

    def note(self, name: str, kind: Kind, tensor: Tensor) -> None:
        """Add a tensor of this step to a module's norm."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        with torch.no_grad():
            square = torch.linalg.vector_norm(local.detach(), dtype=torch.float32).square()
        key = (name, kind)
        before = self._squares.get(key)
        self._squares[key] = square if before is None else before + square

    def step(self, loss: Tensor | float) -> Spike | None:
        """End a step: compare it with those before, and warn if its loss left their range.

        Reads from the device once. Call it behind ``backward()``.
        """
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        norms = self._norms()
        usual = self._upper(self._losses)
        spike = None
        if usual is not None and not value <= usual:
            spike = self._found(value, usual, norms)
            self.spikes.append(spike)
            warnings.warn(str(spike), stacklevel=2)
        else:
            # A spike does not widen what is usual.
            self._losses.append(value)
            for key, norm in norms.items():
                self._histories.setdefault(key, deque(maxlen=self._window)).append(norm)
        self._num_steps += 1
        return spike

    def _norms(self) -> dict[tuple[str, Kind], float]:
        squares, self._squares = self._squares, {}
        if not squares:
            return {}
        device = next(iter(squares.values())).device
        values = torch.stack([each.to(device) for each in squares.values()]).sqrt().tolist()
        return dict(zip(squares, values, strict=True))

    def _found(self, loss: float, usual: float, norms: dict[tuple[str, Kind], float]) -> Spike:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for key, norm in norms.items():
            upper = self._upper(self._histories.get(key, ()))
            if upper is not None and not norm <= upper:
                module, kind = key
                return Spike(
                    step=self._num_steps,
                    loss=loss,
                    usual=usual,
                    module=module,
                    kind=kind,
                    norm=norm,
                    usual_norm=upper,
                    rank=rank,
                )
        return Spike(step=self._num_steps, loss=loss, usual=usual, rank=rank)

    def _upper(self, values: Any) -> float | None:
        """Return the end of the range of values; None as long as there are few."""
        if len(values) < _MIN_STEPS:
            return None
        middle = statistics.fmean(values)
        width = max(statistics.pstdev(values), _MIN_WIDTH * math.fabs(middle))
        return middle + self._deviations * width


@contextmanager
def detect_spikes(
    model: nn.Module, *, window: int = 50, deviations: float = 6.0
) -> Iterator[SpikeWatch]:
    """Warn when a loss leaves its running range, with the step and the module where that began.

    The norm of every module's output, and of that output's gradient, is kept on the device and
    read once a step. Outside of the block it costs nothing. No number changes.

    Args:
        model: Parallelized or not. A rank watches its modules and its rows.
        window: Steps that a range is of.
        deviations: How many standard deviations above the mean a range ends.

    Raises:
        ValueError: If the window is shorter than 5 steps, or ``deviations`` are not positive.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> with detect_spikes(model) as watch:
        ...     for _ in range(8):
        ...         loss = model(torch.ones(1, 2)).square().sum()
        ...         loss.backward()
        ...         _ = watch.step(loss)
        >>> watch.spikes
        []
    """
    if window < _MIN_STEPS or not deviations > 0:
        raise ValueError(
            f"expected a window of at least {_MIN_STEPS} steps and positive deviations, got "
            f"window {window!r} and deviations {deviations!r}"
        )
    watch = SpikeWatch(window, deviations)
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def look(own: nn.Module, args: Any, output: Any, name: str = name) -> None:
                _look(watch, name, output)

            stack.callback(module.register_forward_hook(look).remove)
        yield watch


def _look(watch: SpikeWatch, name: str, output: Any) -> None:
    if is_in_backward():
        return  # run again: it was looked at before
    for leaf in pytree.tree_leaves(output):
        plain = isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.is_meta
        if not plain or isinstance(leaf, FakeTensor):
            continue
        watch.note(name, "output", leaf)
        if leaf.requires_grad:
            leaf.register_hook(lambda grad: watch.note(name, "gradient", grad))
