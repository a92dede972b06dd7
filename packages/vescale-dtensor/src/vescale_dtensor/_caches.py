"""What is remembered belongs to the meshes of a job, and is forgotten with it.

It would keep the job's process groups alive, and be wrong in the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

_forgetful: list[Callable[[], object]] = []
_world_of_caches: dist.ProcessGroup | None = None


def forget_with_world(forget: Callable[[], object]) -> None:
    """Call ``forget`` when an emulated world ends, or the first mesh of another job is used."""
    _forgetful.append(forget)


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
