"""The generators of Python and of NumPy, from which forward may draw, too."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def seed_host(seed: int) -> None:
    """Seed them, NumPy's if the program has it."""
    random.seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(seed % 2**32)  # which takes no larger ones


def host_state() -> bytes:
    """Return their state, to compare it."""
    numpy = _numpy()
    return pickle.dumps((random.getstate(), None if numpy is None else numpy.random.get_state()))


@contextmanager
def kept_host_state() -> Iterator[None]:
    """Leave them as they were."""
    numpy, state = _numpy(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _numpy() -> Any:
    return sys.modules.get("numpy")
