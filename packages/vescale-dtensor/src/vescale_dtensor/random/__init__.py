"""Random numbers: which bits an element gets on one device, and how a rank draws only its own."""

from ._cuda_kernels import CudaKernels as CudaKernels, cuda_kernels as cuda_kernels
from ._cuda_part import PhiloxDraws as PhiloxDraws, philox_draws as philox_draws
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
from ._window import Window as Window, memory_order as memory_order

__all__ = [
    "CudaKernels",
    "Draws",
    "Fill",
    "PhiloxDraws",
    "Point",
    "RandomOperator",
    "RandomTensor",
    "Stream",
    "Window",
    "cuda_kernels",
    "draw_part",
    "draws",
    "fill_of",
    "is_state",
    "memory_order",
    "philox_draws",
    "random_operator",
    "state_after_words",
    "words_of",
]
