"""What a tensor tells of its redistributions, to whoever listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vescale_dtensor._caches import own_list
from vescale_dtensor._layout.layout import Layout, placements_text


@dataclass(frozen=True, slots=True)
class Redistribution:
    """A redistribution of a tensor."""

    source: Layout
    target: Layout

    def __str__(self) -> str:
        return f"{self.source} to {placements_text(self.target.placements)}"


_listeners: list[Callable[[Redistribution], None]] = []
own_list(_listeners)


@contextmanager
def redistributions_told(listener: Callable[[Redistribution], None]) -> Iterator[None]:
    """Call ``listener`` for every redistribution."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell_redistribution(source: Layout, target: Layout) -> None:
    """Let the listeners know of a redistribution, unless nothing changes."""
    if source is not target:
        for listener in _listeners:
            listener(Redistribution(source, target))
