"""What this rank tells of its collectives, to whoever listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._caches import own_list

CommunicationKind = Literal["all_gather", "all_to_all", "all_reduce", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective, as this rank saw it.

    Attributes:
        kind: What was called. The reductions are those of a backend's own order; a reduction
            in rank order is made of the other two.
        mesh: On which mesh; None for a bare process group.
        axes: Over which of its axes, as one group.
        num_ranks: How many ranks took part.
        nbytes: Sent by this rank to others; for a backend's reduction, what a ring sends.
        dtype: Of the elements.
        over: Names of the axes, or of the process group; see :func:`name_group`.
    """

    kind: CommunicationKind
    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    num_ranks: int
    nbytes: int
    dtype: torch.dtype
    over: str = "group"


_listeners: list[Callable[[Communication], None]] = []
own_list(_listeners)


@contextmanager
def listening(listener: Callable[[Communication], None]) -> Iterator[None]:
    """Call ``listener`` for every collective this rank takes part in."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def is_anyone_listening() -> bool:
    """Whether it is worth counting what a collective sends."""
    return bool(_listeners)


def tell(event: Communication) -> None:
    """Let the listeners know of a collective."""
    for listener in _listeners:
        listener(event)
