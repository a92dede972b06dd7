"""A process group that gives up soon, for tests in which a rank waits in vain."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def in_short_group(directory: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Run with a process group whose collectives give up after seconds, not a minute."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=4),
    )
    return fn(*args)
