"""What is asked of a CUDA device, in one place; the rest of drawing parts is arithmetic.

The state of a generator is sixteen bytes here: eight of seed, eight of offset.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Generator, Tensor

from ._draw_rules import Fill

THREADS_PER_BLOCK = 256


class CudaKernels:
    """The random kernels of a CUDA device, and its generators.

    Args:
        device: With an index.

    Attributes:
        device: As given.
        num_threads: How many threads torch has a large random kernel run on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        blocks_per_processor = properties.max_threads_per_multi_processor // THREADS_PER_BLOCK
        num_blocks = properties.multi_processor_count * blocks_per_processor
        self.num_threads = num_blocks * THREADS_PER_BLOCK
        self._scratch = Generator(device)

    def default_generator(self) -> Generator:
        """Return the generator that draws if none is given."""
        return torch.cuda.default_generators[self.device.index]

    def state(self, generator: Generator) -> Tensor:
        """Return a copy of the state of ``generator``.

        Raises:
            RuntimeError: If it is a generator of another type of device; torch raises that too.
        """
        expected, got = self.device.type, generator.device.type
        if got != expected:
            raise RuntimeError(f"expected a generator of a {expected!r} device, got a {got!r} one")
        return generator.get_state()

    def set_state(self, generator: Generator, state: Tensor) -> None:
        """Put ``generator`` into a state."""
        generator.set_state(state)

    def draw(self, fill: Fill, state: Tensor, out: Tensor) -> Tensor:
        """Fill ``out`` with what a generator in ``state`` draws; return the state afterwards."""
        self._scratch.set_state(state)
        fill(out, self._scratch)
        return self._scratch.get_state()


# By type of device.
KINDS: dict[str, type[CudaKernels]] = {"cuda": CudaKernels}


@lru_cache(maxsize=64)
def cuda_kernels(device: torch.device) -> CudaKernels | None:
    """Return the kernels of a device, None if it draws in another way than CUDA devices do.

    Args:
        device: With an index, unless its type has none.
    """
    kind = KINDS.get(device.type)
    return None if kind is None else kind(device)
