"""Draw some elements of a random tensor, and not the others.

torch's own kernels draw them, on the blocks in which they would have drawn the whole tensor, with
the generator at the place where it would have been. So the bits are those of the whole.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from ._draw_rules import BLOCK, PAIR_NUM_DRAWS, Draws, Fill
from ._mt19937_jump import NUM_WORDS
from ._mt19937_stream import Point, state_before, words_of
from ._skip_ahead import compiled_walk, discard, words_ahead
from ._strided_runs import Runs, draw_window
from ._strided_view import Window

_STRIDED_NUMEL = 1 << 14
# Nearby places are reached by discarding draws.
_NEAR_NUM_DRAWS = 1 << 16
# Skipping parts of a smaller tensor saves less than compiling takes.
_COMPILED_NUM_DRAWS = 1 << 23
# Words in memory at a time.
_NUM_WORDS = 1 << 18
# In a state, for whole blocks of 16 elements; two at most for each element.
_PACKED_NUM_WORDS = 608
# Setting a state takes as long as drawing about so many words.
_SHORT_NUM_WORDS = 600


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
        num_words, step = out.shape[1] * words, distance * words
        walk = compiled_walk() if self._numel * words >= _COMPILED_NUM_DRAWS else None
        if walk is None or step <= num_words:
            return False
        num_draws = self._point.num_draws + start * words
        state = self._point.stream.state(num_draws)
        is_short = num_words <= _SHORT_NUM_WORDS
        length = 1 + num_words if is_short else NUM_WORDS
        fill = self._fill_together if is_short else self._fill_apart
        for rows in out.split(max(1, _NUM_WORDS // length)):
            ahead, state = words_ahead(walk, state, step, (len(rows), length))
            fill(ahead, rows)
        self._point.stream.arrived(num_draws + len(out) * step, state)
        self._num_draws = -1
        return True

    def _fill_apart(self, ahead: Tensor, rows: Tensor) -> None:
        """Fill each row from a state of its own."""
        state = state_before(())
        state_words = words_of(state)
        for words, row in zip(ahead.unbind(), rows.unbind(), strict=True):
            state_words.copy_(words)
            self._generator.set_state(state)
            self._draws.fill(row, self._generator)

    def _fill_together(self, ahead: Tensor, rows: Tensor) -> None:
        """Fill short rows, as many elements from a state as it has words for."""
        state = state_before(())
        state_words = words_of(state)[1 : 1 + _PACKED_NUM_WORDS]
        drawn = torch.empty(rows.numel(), dtype=rows.dtype)
        numel = _PACKED_NUM_WORDS // self._draws.words_per_element
        packed = ahead[:, 1:].reshape(-1)
        packed = nn.functional.pad(packed, (0, -len(packed) % _PACKED_NUM_WORDS))
        pieces = packed.view(-1, _PACKED_NUM_WORDS).unbind()
        for words, piece in zip(pieces, drawn.split(numel), strict=True):
            state_words.copy_(words)
            self._generator.set_state(state)
            self._draws.fill(piece, self._generator)
        rows.copy_(drawn.view_as(rows))

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
