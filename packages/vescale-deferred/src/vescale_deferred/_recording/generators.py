"""How do generators move during a construction in which nothing is drawn?

[Note: markers] A constructor may seed, fork and restore generators while its random operators are
being recorded. Nothing of torch is replaced to follow that. Instead, after every random operator,
the generator's state is set to a *marker*: words that no seed produces and that say which
:class:`Point` the generator is at. Whoever saves a state saves the marker, and whoever restores it
restores the point; a state that is no marker was set by the constructor, and starts a new stream.
At the end the markers are replaced by the states of their points.

CUDA's generators need none of this: their state is a seed and an offset, and is moved at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Generator, Tensor

from vescale_deferred.exceptions import CannotDefer, DeferredError
from vescale_dtensor.random import (
    CudaKernels,
    Fill,
    PhiloxDraws,
    Point,
    Window,
    is_state,
    philox_draws,
    state_after_words,
    words_of,
)

# No seed leads to these: the words of a seeded generator are all different.
_MARKER_WORDS = 600
_MARK = 0x5EED


class Generators:
    """Where every generator is that took part in one construction."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._moved: dict[int, Generator] = {}
        self._undo: dict[int, Callable[[], object]] = {}
        for generator in _default_generators():
            self.watch(generator)

    def point(self, generator: Generator) -> Point:
        """Return where ``generator`` of the CPU is."""
        state = generator.get_state()
        self._watch(generator, state, generator.set_state)
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
        self._moved[id(generator)] = generator
        generator.set_state(marker_state(generator.get_state(), len(self._points) - 1))

    @contextmanager
    def drawing(self, generator: Generator) -> Iterator[None]:
        """Let ``generator`` draw for real inside."""
        generator.set_state(self.point(generator).state())
        yield
        self.move(generator, Point.of(generator.get_state()))

    def draw_on_cuda(
        self, fill: Fill, window: Window, generator: Generator, kernels: CudaKernels
    ) -> PhiloxDraws | None:
        """Move ``generator`` as ``fill`` does; return what that draws, None if it is not known."""
        state = self.watch_cuda(generator, kernels)
        found = philox_draws(fill, window, state, kernels)
        if found is not None:
            kernels.set_state(generator, found.end)
        return found

    def watch(self, generator: Generator) -> None:
        """Remember where a generator is that is about to draw for real."""
        self._watch(generator, generator.get_state(), generator.set_state)

    def watch_cuda(self, generator: Generator, kernels: CudaKernels) -> Tensor:
        """Return the state of a generator that is about to draw."""
        state = kernels.state(generator)
        self._watch(generator, state, partial(kernels.set_state, generator))
        return state

    def settle(self) -> None:
        """Leave every generator in the state that ordinary construction would have left."""
        for generator in self._moved.values():
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
        for undo in reversed(self._undo.values()):
            undo()

    def check_untouched(self, before: Tensor, name: str) -> None:
        """Raise CannotDefer if the default generator drew in an operator not known to draw."""
        if not torch.equal(before, torch.default_generator.get_state()):
            raise CannotDefer(f"{name} drew random numbers, although it is not known as random")

    def _watch(
        self, generator: Generator, state: Tensor, set_state: Callable[[Tensor], object]
    ) -> None:
        """Remember the first state of a generator; the generator too, so that its id stays."""
        self._undo.setdefault(id(generator), partial(set_state, state))


def _default_generators() -> list[Generator]:
    on_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *on_cuda]


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
