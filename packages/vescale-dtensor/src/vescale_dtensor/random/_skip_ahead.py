"""Move a CPU generator past words without making numbers of them.

torch can only draw, which takes ten times as long as the recurrence itself. numba, where it is
installed, compiles the recurrence; without it words are drawn and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Generator, Tensor

from ._mt19937_jump import NUM_WORDS

_SHIFT = 397
_DISCARD_NUMEL = 1 << 15

# Takes a state as 632 integers, a distance, and where to put words: row i gets those from the one
# before i * distance on. The state is changed to what follows all distances.
Walk = Callable[[Any, int, Any], None]


def discard(generator: Generator, num_draws: int) -> None:
    """Draw ``num_draws`` words for nothing, in cache-sized pieces."""
    pairs = torch.empty(min(num_draws // 2, _DISCARD_NUMEL), dtype=torch.int64)
    while num_draws > 1:
        piece = pairs[: num_draws // 2]
        piece.random_(generator=generator)  # two words an element
        num_draws -= 2 * len(piece)
    if num_draws:
        torch.empty(1, dtype=torch.uint8).random_(generator=generator)  # one


def words_ahead(
    walk: Walk, state: Tensor, distance: int, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return words as a state holds them, and the state after all distances.

    Row i holds the word that was drawn last before i times ``distance`` draws, and what follows.
    624 in a row make a state.

    Args:
        walk: From :func:`compiled_walk`.
        state: Of a generator.
        distance: No less than the words of a row that follow the first.
        shape: How many rows, of how many words.
    """
    end = state.clone()
    words = torch.empty(shape, dtype=torch.int64)
    walk(end.view(torch.int64).numpy(), distance, words.numpy())
    return words, end


@lru_cache(maxsize=1)
def compiled_walk() -> Walk | None:
    """Return the recurrence, compiled; None without numba. The first call takes seconds."""
    if find_spec("numba") is None:
        return None
    import numba
    import numpy as np

    uint32, int64 = np.uint32, np.int64
    one, twist = uint32(1), uint32(0x9908B0DF)
    upper, lower = uint32(0x80000000), uint32(0x7FFFFFFF)

    def walk(state: Any, distance: int, words: Any) -> None:
        # The integers of a state: seed; left and seeded; next; the words; the spare normal.
        w = state[3 : 3 + NUM_WORDS].astype(uint32)
        at = NUM_WORDS - (state[1] & int64(0xFFFFFFFF))  # of the last word that was drawn
        num_rows, length = words.shape
        row, done = 0, 0  # words of this row that are passed
        while row < num_rows or at == NUM_WORDS:
            if at == NUM_WORDS:
                at = 0
                # In neither loop is a word read after it was written nearby: they vectorise.
                for i in range(NUM_WORDS - _SHIFT):
                    bits = (w[i] & upper) | (w[i + 1] & lower)
                    w[i] = w[i + _SHIFT] ^ (bits >> one) ^ (twist * (w[i + 1] & one))
                for i in range(NUM_WORDS - _SHIFT, NUM_WORDS - 1):
                    bits = (w[i] & upper) | (w[i + 1] & lower)
                    w[i] = w[i + _SHIFT - NUM_WORDS] ^ (bits >> one) ^ (twist * (w[i + 1] & one))
                bits = (w[NUM_WORDS - 1] & upper) | (w[0] & lower)
                w[NUM_WORDS - 1] = w[_SHIFT - 1] ^ (bits >> one) ^ (twist * (w[0] & one))
            elif done < length:
                count = min(length - done, NUM_WORDS - at)
                words[row, done : done + count] = w[at : at + count]
                done, at = done + count, at + count
            else:
                count = min(distance - done, NUM_WORDS - at)
                done, at = done + count, at + count
                if done == distance:
                    row, done = row + 1, 0
        state[3 : 3 + NUM_WORDS] = w
        state[1] = (state[1] >> 32 << 32) + NUM_WORDS - at
        state[2] = at + 1

    signature = "void(int64[::1], int64, int64[:, ::1])"
    try:
        return numba.njit(signature, cache=True)(walk)
    except RuntimeError:  # there is no directory for it
        return numba.njit(signature)(walk)
