"""How do generators move during a construction in which nothing is drawn?

[Note: markers] A constructor may seed, fork and restore generators while its random operators are
being recorded. Nothing of torch is replaced to follow that. Instead, after every random operator,
the generator's state is set to a *marker*: words that no seed produces and that say which
:class:`Point` the generator is at. Whoever saves a state saves the marker, and whoever restores it
restores the point; a state that is no marker was set by the constructor, and starts a new stream.
At the end the markers are replaced by the states of their points.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from vescale_dtensor.random import Point, is_state

from ._markers import marker_state, marker_value
from .exceptions import CannotDefer, DeferredError


class Generators:
    """Where every generator is that took part in one construction."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._initial: dict[int, tuple[Generator, Tensor]] = {}

    def point(self, generator: Generator) -> Point:
        """Return where ``generator`` is."""
        state = generator.get_state()
        self._initial.setdefault(id(generator), (generator, state))
        marker = marker_value(state)
        if marker is None:
            return Point.of(state)
        if marker >= len(self._points):
            raise DeferredError(
                "a generator has a state that was saved in the constructor of another deferred "
                "module; such a state is of use only there"
            )
        return self._points[marker]

    def move(self, generator: Generator, point: Point) -> None:
        """Put ``generator`` at ``point``."""
        self._points.append(point)
        generator.set_state(marker_state(generator.get_state(), len(self._points) - 1))

    @contextmanager
    def drawing(self, generator: Generator) -> Iterator[None]:
        """Let ``generator`` draw for real inside."""
        generator.set_state(self.point(generator).state())
        yield
        self.move(generator, Point.of(generator.get_state()))

    def settle(self) -> None:
        """Leave every generator in the state that ordinary construction would have left."""
        for generator, _ in self._initial.values():
            if marker_value(generator.get_state()) is not None:
                generator.set_state(self.point(generator).state())

    def real_state(self, tensor: Tensor) -> Tensor:
        """Return the state a generator had if ``tensor`` is one that the constructor kept."""
        if type(tensor) is not Tensor or not is_state(tensor):
            return tensor
        marker = marker_value(tensor)
        return tensor if marker is None else self._points[marker].state()

    def rewind(self) -> None:
        """Put every generator back to where it was before."""
        for generator, state in self._initial.values():
            generator.set_state(state)

    def check_untouched(self, before: Tensor) -> None:
        """Raise if the default generator drew although the operator was not known to draw."""
        if not torch.equal(before, torch.default_generator.get_state()):
            raise CannotDefer("an operator drew random numbers without saying so")
