"""Random numbers: which bits an element gets on one device, and how a rank draws only its own.

This is the room that emulates torch's generators: MT19937 and MKL's streams on CPUs, Philox on
GPUs. What it knows of them is measured, not taken on trust; nothing else in veScale does so.
"""

from ._cpu_shard import RandomTensor as RandomTensor
from ._cuda_kernels import CudaKernels as CudaKernels, cuda_kernels as cuda_kernels
from ._draw_rules import Draws as Draws, Fill as Fill, draws as draws
from ._draw_shard import draw_part as draw_part, point_after as point_after
from ._mt19937_stream import (
    Point as Point,
    Stream as Stream,
    is_state as is_state,
    state_after_words as state_after_words,
    words_between as words_between,
    words_of as words_of,
)
from ._philox_shard import PhiloxDraws as PhiloxDraws, philox_draws as philox_draws
from ._random_ops import (
    RandomOperator as RandomOperator,
    fill_of as fill_of,
    random_operator as random_operator,
)
from ._strided_view import Window as Window, memory_order as memory_order

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
    "point_after",
    "random_operator",
    "state_after_words",
    "words_between",
    "words_of",
]
