"""Generators as they were, for what runs again and has to draw what it drew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vescale_parallel._trace.generators import (
    GeneratorStates as GeneratorStates,
    States,
    python_and_numpy_as,
    states_of_generators,
)


class PythonAndNumpy:
    """What a function draws from Python's generator and NumPy's, of which torch knows nothing."""

    def __init__(self) -> None:
        self._states: States | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note from where it draws, if it does."""
        before = states_of_generators()
        yield
        if before.differs_outside_of_torch(states_of_generators()):
            self._states = before

    def again(self) -> contextlib.AbstractContextManager[None]:
        """Have it draw from there again, and leave the generators as they are."""
        return (
            contextlib.nullcontext() if self._states is None else python_and_numpy_as(self._states)
        )
