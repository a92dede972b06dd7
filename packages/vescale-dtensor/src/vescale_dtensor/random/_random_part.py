"""Draw some elements of a random tensor, and not the others.

torch's own kernels draw them, on the blocks in which they would have drawn the whole tensor, with
the generator at the place where it would have been. So the bits are those of the whole.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ._draws import BLOCK, PAIR_NUM_DRAWS, Draws, Fill
from ._runs import Runs, draw_window
from ._stepping import compiled_walk, discard, states_ahead
from ._streams import Point
from ._window import Window

_STRIDED_NUMEL = 1 << 14
# Nearby places are reached by discarding draws.
_NEAR_NUM_DRAWS = 1 << 16
# Skipping parts of a smaller tensor saves less than compiling takes.
_COMPILED_NUM_DRAWS = 1 << 23
# Generator states in memory at a time, of 5 KiB.
_NUM_STATES = 256


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
        draw_window(Runs(self._draw_run, self._draw_rows), window, out)
        if self._num_draws >= 0:
            self._point.stream.arrived(self._num_draws, self._generator.get_state())

    def _draw_run(self, start: int, out: Tensor) -> None:
        """Draw the elements from ``start`` on into ``out``, contiguous, 1D."""
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

    def _draw_rows(self, start: int, distance: int, out: Tensor) -> bool:
        """Draw equally distant runs into the rows of ``out`` if that is worth it."""
        words = self._draws.words_per_element
        in_blocks = self._draws.tail is not None
        if in_blocks and any(n % BLOCK for n in (start, distance, out.shape[1], self._numel)):
            return False
        walk = compiled_walk() if self._numel * words >= _COMPILED_NUM_DRAWS else None
        if walk is None:
            return False
        num_draws = self._point.num_draws + start * words
        state = self._point.stream.state(num_draws)
        copy = torch.empty_like(state)
        for rows in out.split(_NUM_STATES):
            states, state = states_ahead(walk, state, distance * words, len(rows))
            for row, before in zip(rows.unbind(), states.unbind(), strict=True):
                # torch 2.13 crashes if given a part of a tensor.
                self._generator.set_state(copy.copy_(before))
                self._draws.fill(row, self._generator)
        self._point.stream.arrived(num_draws + len(out) * distance * words, state)
        self._num_draws = -1
        return True

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
        else:
            discard(self._generator, distance)
        self._num_draws = num_draws


class PairedNormals:
    """Numbers that one random method makes from normals, drawn one after the other in pairs.

    The first of them may be the spare that the generator kept.

    Args:
        fill: What is drawn.
        point: Where the generator was.
    """

    def __init__(self, fill: Fill, point: Point) -> None:
        self._fill = fill
        self._point = point

    def draw(self, window: Window, out: Tensor) -> None:
        """Put the elements at ``window`` into ``out``, as :class:`RandomTensor` does."""
        draw_window(Runs(self._draw_run), window, out)

    def _draw_run(self, start: int, out: Tensor) -> None:
        """Draw the elements from ``start`` on into ``out``, contiguous, 1D."""
        generator = Generator()
        # Elements from here to the end of ``out`` that come from pairs, not from the old spare.
        numel = len(out)
        if start == 0:
            num_draws = self._point.num_draws
            generator.set_state(self._point.state())
            numel -= self._point.spare is not None
        else:
            pair, is_second = divmod(start - (self._point.spare is not None), 2)
            num_draws = self._point.num_draws + pair * PAIR_NUM_DRAWS
            generator.set_state(self._point.stream.state(num_draws))
            if is_second:
                self._fill(out[:1].clone(), generator)
                numel += 1
        # Contiguous normals would be drawn in blocks.
        strided = torch.empty(min(len(out), _STRIDED_NUMEL), 2, dtype=out.dtype)[:, 0]
        for piece in out.split(_STRIDED_NUMEL):
            drawn = strided[: len(piece)]
            self._fill(drawn, generator)
            piece.copy_(drawn)
        num_draws += PAIR_NUM_DRAWS * -(-numel // 2)
        self._point.stream.arrived(num_draws, generator.get_state())
