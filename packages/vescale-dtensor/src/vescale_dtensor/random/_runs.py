"""Put boxes of a tensor together from runs of its elements in the order they are drawn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._window import Window

# Draws the elements from a place in the drawing order on into a contiguous tensor of one dim.
DrawRun = Callable[[int, Tensor], None]

# Elements in between are drawn too, and dropped, if no more than these have to be held.
_SCRATCH_NUMEL = 1 << 18


def draw_window(draw_run: DrawRun, window: Window, out: Tensor) -> None:
    """Put the elements at ``window`` into ``out``.

    Args:
        draw_run: Draws them.
        window: In units of elements in drawing order, no stride being zero.
        out: Of the shape of ``window``.
    """
    dims = [dim for dim, size in enumerate(window.shape) if size > 1]
    dims.sort(key=lambda dim: window.stride[dim], reverse=True)
    sizes = [window.shape[dim] for dim in dims]
    target = out.as_strided(sizes, [out.stride(dim) for dim in dims], out.storage_offset())
    _draw_nested(draw_run, window.offset, [window.stride[dim] for dim in dims], target)


def _draw_nested(draw_run: DrawRun, offset: int, strides: list[int], out: Tensor) -> None:
    """Draw elements whose dims go from wide strides to narrow ones."""
    span = 1 + sum(stride * (size - 1) for stride, size in zip(strides, out.shape, strict=True))
    if span == out.numel() and out.is_contiguous():
        draw_run(offset, out.view(-1))
    elif span <= _SCRATCH_NUMEL:
        scratch = torch.empty(span, dtype=out.dtype, device=out.device)
        draw_run(offset, scratch)
        out.copy_(scratch.as_strided(out.shape, strides))
    else:
        inner_span = span - strides[0] * (len(out) - 1)
        step = 1 + max(0, _SCRATCH_NUMEL - inner_span) // strides[0]
        for begin in range(0, len(out), step):
            rows = out[begin : begin + step]
            start = offset + begin * strides[0]
            if len(rows) == 1:
                _draw_nested(draw_run, start, strides[1:], rows[0])
            else:
                _draw_nested(draw_run, start, strides, rows)
