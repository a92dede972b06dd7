"""Run something and leave every generator of random numbers as it was."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import outside_of_transforms


@dataclass(frozen=True)
class States:
    """Of the host's generators; None for numpy's if nothing has imported it."""

    torch: Tensor
    python: Any
    numpy: Any

    def differs_outside_of_torch(self, other: States) -> bool:
        """Whether something was drawn by Python's random or by numpy in between."""
        return self.python != other.python or _of_numpy(self) != _of_numpy(other)


def _of_numpy(states: States) -> object:
    if states.numpy is None:
        return None
    name, key, *rest = states.numpy
    return name, key.tobytes(), rest


def states_of_generators() -> States:
    """Return the states of the host's generators: torch's, Python's and numpy's."""
    numpy: Any = sys.modules.get("numpy")
    return States(
        torch.default_generator.get_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def generator_state() -> tuple[bytes, ...]:
    """Return the states of torch's generators, of the CPU and of this CUDA device."""
    with outside_of_transforms():  # whose tensors have no bytes
        states = [torch.get_rng_state()]
        if torch.cuda.is_available():
            states.append(torch.cuda.get_rng_state())
        return tuple(state.numpy().tobytes() for state in states)


def set_generators(states: States) -> None:
    """Put back what :func:`states_of_generators` gave."""
    torch.default_generator.set_state(states.torch)
    random.setstate(states.python)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and states.numpy is not None:
        numpy.random.set_state(states.numpy)


class GeneratorStates:
    """The states of the generators that forward draws from, now."""

    def __init__(self) -> None:
        self._host = states_of_generators()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def put_back(self) -> None:
        """Have the generators be there again."""
        set_generators(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


@contextlib.contextmanager
def python_and_numpy_as(states: States) -> Iterator[None]:
    """Have Python's generator and NumPy's draw what they drew behind some states."""
    held = states_of_generators()
    set_generators(States(held.torch, states.python, states.numpy))
    try:
        yield
    finally:
        now = torch.default_generator.get_state()
        set_generators(States(now, held.python, held.numpy))


@contextlib.contextmanager
def forked_generators(seed: int, *, cuda: bool) -> Iterator[None]:
    """Draw from torch's generators of the host, and of this CUDA device, as seeded anew.

    Not by torch.manual_seed, which would seed all devices and not those forked alone.
    """
    devices = [torch.cuda.current_device()] if cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


@contextlib.contextmanager
def untouched_generators(seed: int | None = None) -> Iterator[None]:
    """Put back the states of the host's generators at the end: torch's, Python's and numpy's.

    With a ``seed``, torch's generator of the CPU starts with that inside.

    Those of devices are not drawn from on the host, and torch.manual_seed, which would seed all
    of them, is not called. torch.random.fork_rng would leave them seeded.
    """
    held = states_of_generators()
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
    finally:
        set_generators(held)
