"""The process group that a mesh stands on, and the device of this rank."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]: public

# Longer than any step; a collective that takes as long is a bug or a dead rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def this_device() -> torch.device:
    """Return the accelerator of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def start_process_group() -> None:
    """Join torchrun's process group, or a group of one without torchrun, if nobody did yet."""
    device = this_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(
            backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
        )
    atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
