"""Put boxes of a tensor together from runs of its elements in the order they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._strided_view import Window

# Draws the elements from a place in the drawing order on into a contiguous tensor of one dim.
DrawRun = Callable[[int, Tensor], None]
# Draws such runs, equally far apart, into the rows of a matrix; says so if it cannot.
DrawRows = Callable[[int, int, Tensor], bool]


@dataclass(frozen=True, slots=True)
class Runs:
    """How elements of a random tensor are drawn, and what beginning anew costs.

    Attributes:
        draw: Draws a run.
        draw_rows: Draws many at once, where that is known.
        gap_numel: So many unwanted elements between two runs are skipped, fewer are drawn and
            dropped if the scratch memory holds them.
        scratch_numel: Elements of the scratch memory.
    """

    draw: DrawRun
    draw_rows: DrawRows | None = None
    gap_numel: int = 1 << 13
    scratch_numel: int = 1 << 18


def draw_window(runs: Runs, window: Window, out: Tensor) -> None:
    """Put the elements at ``window`` into ``out``, which has its shape.

    The window is in units of elements in drawing order, no stride being zero.
    """
    dims = [dim for dim, size in enumerate(window.shape) if size > 1]
    dims.sort(key=lambda dim: window.stride[dim], reverse=True)
    sizes = [window.shape[dim] for dim in dims]
    target = out.as_strided(sizes, [out.stride(dim) for dim in dims], out.storage_offset())
    _draw_nested(runs, window.offset, [window.stride[dim] for dim in dims], target)


def _draw_nested(runs: Runs, offset: int, strides: list[int], out: Tensor) -> None:
    """Draw elements whose dims go from wide strides to narrow ones."""
    span = _span(strides, out.shape)
    if span == out.numel() and out.is_contiguous():
        runs.draw(offset, out.view(-1))
    elif _are_rows(strides, out) and runs.draw_rows and runs.draw_rows(offset, strides[0], out):
        pass
    elif _gap(strides, out) < runs.gap_numel and span <= runs.scratch_numel:
        scratch = torch.empty(span, dtype=out.dtype, device=out.device)
        runs.draw(offset, scratch)
        out.copy_(scratch.as_strided(out.shape, strides))
    else:
        step = 1 + (runs.scratch_numel - _span(strides[1:], out.shape[1:])) // strides[0]
        if step <= 1 or _gap(strides, out) >= runs.gap_numel:
            for index, row in enumerate(out):
                _draw_nested(runs, offset + index * strides[0], strides[1:], row)
        else:
            for begin in range(0, len(out), step):
                rows = out[begin : begin + step]
                _draw_nested(runs, offset + begin * strides[0], strides, rows)


def _gap(strides: Sequence[int], out: Tensor) -> int:
    """Return the number of elements between two neighbours along the first dim."""
    return strides[0] - _span(strides[1:], out.shape[1:])


def _are_rows(strides: list[int], out: Tensor) -> bool:
    return len(strides) == 2 and strides[1] == out.stride(1) == 1


def _span(strides: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of elements from the first to the last, with those in between."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
