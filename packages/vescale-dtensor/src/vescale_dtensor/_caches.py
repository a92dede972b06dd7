"""What is remembered belongs to the meshes of a job, and is forgotten with it.

It would keep the job's process groups alive, and be wrong in the next one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

_forgetful: list[Callable[[], object]] = []
_world_of_caches: dist.ProcessGroup | None = None


def forget_with_world(forget: Callable[[], object]) -> None:
    """Call ``forget`` when an emulated world ends, or the first mesh of another job is used."""
    _forgetful.append(forget)


class RanksOwn(NamedTuple):
    """A variable that every process has; ranks in one process take turns with it.

    Attributes:
        get: Return its value, which later changes do not reach.
        put: Give it a value.
        fresh: Return the value that it has in a new process.
    """

    get: Callable[[], Any]
    put: Callable[[Any], object]
    fresh: Callable[[], Any]


RANKS_OWN: list[RanksOwn] = []


def own_list(values: list[Any]) -> None:
    """Let every rank have a list of its own, where ranks are threads of one process."""

    def put(taken: list[Any]) -> None:
        values[:] = taken

    RANKS_OWN.append(RanksOwn(values.copy, put, list))


def own_variable(holder: str | type, name: str) -> None:
    """Let every rank have a variable of its own, of a module, by its name, or of a class.

    A rank begins with its value of now.
    """
    where = sys.modules[holder] if isinstance(holder, str) else holder
    fresh = getattr(where, name)

    def get() -> Any:
        return getattr(where, name)

    def put(value: Any) -> None:
        setattr(where, name, value)

    RANKS_OWN.append(RanksOwn(get, put, lambda: fresh))


def forget_world() -> None:
    """Empty all caches."""
    for forget in _forgetful:
        forget()


def notice_world() -> dist.ProcessGroup | None:
    """Return the job's process group, having forgotten the one before it."""
    global _world_of_caches
    world = dist.group.WORLD
    if world is not _world_of_caches and world is not None:
        if _world_of_caches is not None:
            forget_world()
        _world_of_caches = world
    return world


own_variable(__name__, "_world_of_caches")
