"""Ranks that are threads of this process: several of them cost a tenth of a second."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import _C  # pyright: ignore[reportPrivateUsage]
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]: public
from torch.testing._internal.distributed import multi_threaded_pg

from vescale_parallel._mesh.process_group import start_process_group
from vescale_parallel._pipeline.cuts.hooks import _Now  # pyright: ignore[reportPrivateUsage]
from vescale_parallel._pipeline.cuts.placeholders import Placeholder

InThreads = Callable[..., list[Any]]

# What torch tests its own collectives with; seen in torch 2.11 to 2.15. Without it a process has
# one default group, and so is one rank.
_isolate: Callable[[bool], None] = _C._distributed_c10d._set_thread_isolation_mode  # pyright: ignore[reportAttributeAccessIssue]: the stubs lack it
if torch.__version__ < "2.12":
    # Ending a group asks threads for the communicators of another library, which they lack there.
    _thread_world: Any = multi_threaded_pg.ThreadLocalWorld
    _thread_world.comms = property(lambda _: [])


@pytest.fixture
def in_threads() -> Iterator[InThreads]:
    """Run a function of the rank on every rank of a gloo world; return what they returned.

    A rank that leaves a collective keeps whoever drops its group waiting: such a test gives a
    shorter ``timeout``, in seconds.

    Modules are made outside of it: torch's generator is one for all threads. So are placeholders
    of a pipeline, whose stages have to take turns.
    """
    _isolate(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        yield _run
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        _isolate(False)


def _run(world_size: int, function: Callable[[int], Any], timeout: float = 60.0) -> list[Any]:
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []
    store = HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    # torch makes the tensor of get_rng_state while it holds the generator's lock. A collection
    # that begins there may let another thread run, which waits for that lock and never lets go
    # of Python's.
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.enable()
        # One for all threads: what ends last puts back what another one had set.
        _Now.is_outline, Placeholder.usable = False, True
    if errors:
        raise errors[0]
    return results


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """The process group that ``parallelize`` starts without torchrun, and its end."""
    is_ours = not dist.is_initialized()
    start_process_group()
    yield
    if is_ours and dist.is_initialized():
        dist.destroy_process_group()
