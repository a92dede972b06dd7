"""States that stand for a place in a stream; see [Note: markers] in generators.py."""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor.random import state_after_words, words_of

# No seed leads to these: the words of a seeded generator are all different.
_MARKER_WORDS = 600
_MARK = 0x5EED


def marker_state(state: Tensor, value: int) -> Tensor:
    """Return a state that draws nonsense and tells ``value``, with the seed of ``state``."""
    words = torch.full_like(words_of(state), value)
    words[:_MARKER_WORDS] = _MARK
    return state_after_words(words, state)


def marker_value(state: Tensor) -> int | None:
    """Return the value of a marker, None for an ordinary state."""
    words = words_of(state)
    if words[0] != _MARK or not bool((words[:_MARKER_WORDS] == _MARK).all()):
        return None
    return int(words[-1])
