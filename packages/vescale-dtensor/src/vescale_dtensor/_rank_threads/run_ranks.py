"""Run a distributed program with all of its ranks in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vescale_dtensor._caches import forget_world

from .baton import Baton
from .output import Breakpoints, output_of
from .own_state import OwnState, put_fresh
from .torch_distributed import connecting_threads

T = TypeVar("T")


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    *,
    args: tuple[Any, ...] = (),
    rank: int | None = None,
) -> list[T]:
    """Call a function on every rank of a world that lives in this process.

    Ranks run in turn, one until it waits for others; every rank has process groups, random
    generators, a default dtype and torchrun's environment variables of its own, as processes do.

    Args:
        function: What ``torchrun`` would start: it may call ``init_process_group``, and need not.
        world_size: Number of ranks.
        args: What to call it with; the ranks get the same objects.
        rank: Whose prints and breakpoints to show; None for all, each line with its rank.

    Returns:
        What each rank returned.

    Raises:
        DeadlockError: If no rank can go on, with where each of them waits.
        NotImplementedError: If a rank waits for others within a jvp or dual_level.
        ValueError: If the process has a world of several ranks already.
    """
    _check(world_size, rank)
    breakpoints = Breakpoints(rank)
    outside = OwnState()
    states: list[OwnState | None] = [None] * world_size

    def switch(before: int | None, after: int | None) -> None:
        breakpoints.stop_in(after)
        if before is None:
            outside.take()
        elif (state := states[before]) is not None:
            state.take()
        else:
            states[before] = OwnState()
        if after is None:
            outside.put()
        elif (state := states[after]) is not None:
            state.put()
        else:
            outside.put()
            put_fresh(after, _local_rank(after))

    baton = Baton(world_size, switch)

    def work(_: int) -> T:
        # Backward passes on this thread too, where the rank's process groups are known.
        with torch.autograd.set_multithreading_enabled(False):
            torch.set_num_threads(_num_threads())
            try:
                return function(*args)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    with ExitStack() as stack:
        stack.enter_context(_as_before())
        stack.enter_context(_environment_of(world_size))
        stack.enter_context(output_of(baton, rank))
        stack.enter_context(connecting_threads(baton, world_size))
        try:
            return baton.run(work)
        except BaseException as error:
            if baton.failed_rank is not None:
                error.add_note(f"raised on emulated rank {baton.failed_rank} of {world_size}")
            raise


def _check(world_size: int, rank: int | None) -> None:
    if world_size < 1:
        raise ValueError(f"expected a world_size of at least 1, got {world_size}")
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"expected a rank in 0..{world_size - 1}, or None for all, got {rank}")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"expected a process of its own for emulated ranks, got rank {dist.get_rank()} of a "
            f"world of {dist.get_world_size()}; start the program without torchrun"
        )


def _local_rank(rank: int) -> int:
    return rank % max(1, torch.cuda.device_count()) if torch.cuda.is_available() else rank


def _num_threads() -> int:
    """Return the threads of an operator that torchrun gives a process: sums depend on it."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


@contextmanager
def _as_before() -> Iterator[None]:
    """Leave nothing behind of what ranks change for the process, and do not keep."""
    num_threads, hook = torch.get_num_threads(), sys.excepthook
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        sys.excepthook = hook
        forget_world()


@contextmanager
def _environment_of(world_size: int) -> Iterator[None]:
    """Set what torchrun sets for every rank alike."""
    values = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
