"""Run something and leave every generator of random numbers as it was."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def untouched_generators(seed: int | None = None) -> Iterator[None]:
    """Put back the states of the host's generators at the end: torch's, Python's and numpy's.

    Those of devices are not drawn from on the host, and torch.manual_seed, which would seed all
    of them, is not called. torch.random.fork_rng would leave them seeded.

    Args:
        seed: What torch's generator of the CPU starts with inside; None to leave it as it is.
    """
    generator = torch.default_generator
    held, held_python = generator.get_state(), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    held_numpy: Any = None if numpy is None else numpy.random.get_state()
    try:
        if seed is not None:
            generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(held)
        random.setstate(held_python)
        if numpy is not None and held_numpy is not None:
            numpy.random.set_state(held_numpy)
