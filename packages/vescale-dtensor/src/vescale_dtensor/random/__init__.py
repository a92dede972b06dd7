"""Random numbers: which bits an element gets on one device, and how a rank draws only its own."""

from ._draw_part import draw_part as draw_part
from ._draws import Draws as Draws, Fill as Fill, draws as draws
from ._operators import (
    RandomOperator as RandomOperator,
    fill_of as fill_of,
    random_operator as random_operator,
)
from ._random_part import RandomTensor as RandomTensor
from ._streams import (
    Point as Point,
    Stream as Stream,
    is_state as is_state,
    state_after_words as state_after_words,
    words_of as words_of,
)
from ._window import Window as Window

__all__ = [
    "Draws",
    "Fill",
    "Point",
    "RandomOperator",
    "RandomTensor",
    "Stream",
    "Window",
    "draw_part",
    "draws",
    "fill_of",
    "is_state",
    "random_operator",
    "state_after_words",
    "words_of",
]
