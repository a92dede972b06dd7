"""Run a training script with all of its ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vescale_dtensor import run_ranks
from vescale_parallel import ParallelPlan

T = TypeVar("T")


def emulate(
    function: Callable[..., T],
    plan: ParallelPlan | int,
    *,
    args: tuple[Any, ...] = (),
    rank: int | None = None,
) -> list[T]:
    """Call what ``torchrun`` would start on every rank, all of them in this process.

    The numbers are those of the real run, to the bit: losses, gradients, parameters, random
    draws. Exactly one rank runs at a time, until it waits for others; so prints come in one
    order, and a debugger that stops in one rank stops the world. Each rank has process groups,
    random generators, default dtype and torchrun's environment variables of its own; modules that
    are imported, their global variables and what ``args`` holds are the same objects for all.
    Nothing is sent over a network, and with GPUs all ranks use those of this machine, one after
    the other. A rank communicates from its own thread: what would run beside it in the background
    runs at once.

    Args:
        function: The program. It makes model and plan as under torchrun, and may call
            ``torch.distributed.init_process_group``.
        plan: For how many ranks: a plan, or their number.
        args: What to call the function with.
        rank: Whose prints and breakpoints to show. None shows all ranks, with the rank before
            each line.

    Returns:
        What each rank returned, in rank order.

    Raises:
        vescale_dtensor.DeadlockError: If no rank can go on, with where each of them waits.
        NotImplementedError: If a rank waits for others within a jvp or dual_level.
        ValueError: If the process has a world of several ranks already.
        Exception: What a rank raised, with its traceback. The other ranks are ended.

    Example:
        >>> import torch, torch.distributed as dist, vescale
        >>> def add() -> float:
        ...     dist.init_process_group("gloo")
        ...     x = torch.full((), float(dist.get_rank()))
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> vescale.emulate(add, 3)
        [3.0, 3.0, 3.0]
    """
    world_size = plan.world_size if isinstance(plan, ParallelPlan) else plan
    return run_ranks(function, world_size, args=args, rank=rank)
