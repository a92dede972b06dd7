"""Draw some elements of a random tensor, and not the others.

torch's own kernels draw them, on the blocks in which they would have drawn the whole tensor, with
the generator at the place where it would have been. So the bits are those of the whole.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ._draws import BLOCK, Draws
from ._streams import Point
from ._window import Window

# Elements in between are drawn too, and dropped, if no more than these have to be held.
_SCRATCH_NUMEL = 1 << 18
# Nearby places are reached by discarding draws.
_NEAR_NUM_DRAWS = 1 << 16


class RandomTensor:
    """The elements that one random operator draws, in the order it draws them.

    Args:
        numel: Number of elements.
        draws: How they are drawn.
        point: Where the generator was.
    """

    def __init__(self, numel: int, draws: Draws, point: Point) -> None:
        self._numel = numel
        self._draws = draws
        self._point = point
        self._generator = Generator()
        self._num_draws = -1

    def draw(self, window: Window, out: Tensor) -> None:
        """Put the elements at ``window`` into ``out``.

        Args:
            window: In units of elements in drawing order, no stride being zero.
            out: Of the shape of ``window``.
        """
        dims = [dim for dim, size in enumerate(window.shape) if size > 1]
        dims.sort(key=lambda dim: window.stride[dim], reverse=True)
        sizes = [window.shape[dim] for dim in dims]
        target = out.as_strided(sizes, [out.stride(dim) for dim in dims], out.storage_offset())
        self._draw_nested(window.offset, [window.stride[dim] for dim in dims], target)

    def _draw_nested(self, offset: int, strides: list[int], out: Tensor) -> None:
        """Draw elements whose dims go from wide strides to narrow ones."""
        span = 1 + sum(
            stride * (size - 1) for stride, size in zip(strides, out.shape, strict=True)
        )
        if span == out.numel() and out.is_contiguous():
            self._draw_run(offset, out.view(-1))
        elif span <= _SCRATCH_NUMEL:
            scratch = torch.empty(span, dtype=out.dtype)
            self._draw_run(offset, scratch)
            out.copy_(scratch.as_strided(out.shape, strides))
        else:
            inner_span = span - strides[0] * (len(out) - 1)
            step = 1 + max(0, _SCRATCH_NUMEL - inner_span) // strides[0]
            for begin in range(0, len(out), step):
                rows = out[begin : begin + step]
                start = offset + begin * strides[0]
                if len(rows) == 1:
                    self._draw_nested(start, strides[1:], rows[0])
                else:
                    self._draw_nested(start, strides, rows)

    def _draw_run(self, start: int, out: Tensor) -> None:
        """Draw the elements from ``start`` on; ``out`` is contiguous, 1D."""
        if self._draws.tail is None:
            self._fill(start, out)
            return
        # The last 16 elements are a block of their own unless they are one anyway.
        regular = self._numel if self._numel % BLOCK == 0 else self._numel - BLOCK
        stop = start + len(out)
        if start < regular:
            self._draw_blocks(start, out[: regular - start])
        if stop > regular:
            last = torch.empty(BLOCK, dtype=out.dtype)
            self._fill(self._draws.tail.start(self._numel), last)
            begin = max(start, regular)
            out[begin - start :] = last[begin - regular : stop - regular]

    def _draw_blocks(self, start: int, out: Tensor) -> None:
        """Draw elements that come from the blocks at multiples of 16."""
        skipped = start % BLOCK
        head = min(len(out), (BLOCK - skipped) % BLOCK)
        whole = (len(out) - head) // BLOCK * BLOCK
        if head:
            self._draw_in_block(start, out[:head])
        if whole:
            self._fill(start + head, out[head : head + whole])
        if head + whole < len(out):
            self._draw_in_block(start + head + whole, out[head + whole :])

    def _draw_in_block(self, start: int, out: Tensor) -> None:
        block = torch.empty(BLOCK, dtype=out.dtype)
        skipped = start % BLOCK
        self._fill(start - skipped, block)
        out.copy_(block[skipped : skipped + len(out)])

    def _fill(self, start: int, out: Tensor) -> None:
        """Fill ``out`` from the words of the elements from ``start`` on."""
        words = self._draws.words_per_element
        self._seek(self._point.num_draws + start * words)
        self._draws.fill(out, self._generator)
        self._num_draws += out.numel() * words

    def _seek(self, num_draws: int) -> None:
        distance = num_draws - self._num_draws
        if self._num_draws < 0 or not 0 <= distance <= _NEAR_NUM_DRAWS:
            if self._num_draws >= 0:
                self._point.stream.arrived(self._num_draws, self._generator.get_state())
            self._generator.set_state(self._point.stream.state(num_draws))
        elif distance:
            torch.empty(distance, dtype=torch.uint8).random_(generator=self._generator)
        self._num_draws = num_draws
