"""Where this rank is in its program, for what it says when a collective breaks.

It is read off the stack when it is asked for. Nothing is noted while a program runs.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist


class HasGroup(Protocol):
    """Ranks that act as one group."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Their process group; None if this rank is alone."""
        ...


class Collective(NamedTuple):
    """A collective that may break.

    Attributes:
        kind: Its name.
        peers: Whose it is.
        name_of: Returns what the peers are called, if somebody asks.
    """

    kind: str
    peers: HasGroup
    name_of: Callable[[Any], str]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, ranks_of(self)))
        return f"{self.kind} over {self.name_of(self.peers)} of ranks {ranks}"


Find = Callable[[Iterator[FrameType]], str]
_finders: list[Find] = []


def find_positions_by(find: Find) -> None:
    """Have a function say where a rank is, for errors of collectives.

    Args:
        find: Called with the frames of the rank's stack, innermost first, when a collective broke
            or a rank raised; returns words such as ``"in forward of 'blocks.2'"``, or none.

    Example:
        >>> find_positions_by(lambda frames: "")
    """
    if find not in _finders:
        _finders.append(find)


def position(error: BaseException | None = None) -> str:
    """Return where this rank is now, or was when it raised an error; empty if nobody knows."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)] if error else []
    for find in reversed(_finders):
        if found := find(_outwards(frames[::-1], sys._getframe(1))):
            return found
    return ""


def waited_for(of: Collective | None) -> str:
    """Return which collective this rank waits in, and where, as the end of a sentence."""
    said = "" if of is None else f" in {of}"
    where = position()
    return f"{said}, {where}" if where else said


def ranks_of(of: Collective | None) -> list[int]:
    """Return the ranks of a collective, all of the job's if it is not known."""
    group = None if of is None else of.peers.group
    if group is None:
        return list(range(dist.get_world_size()))
    return dist.get_process_group_ranks(group)


def _outwards(inner: list[FrameType], frame: FrameType | None) -> Iterator[FrameType]:
    yield from inner
    while frame is not None:
        yield frame
        frame = frame.f_back
