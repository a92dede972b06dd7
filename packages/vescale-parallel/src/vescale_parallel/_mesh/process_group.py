"""The process group that a mesh stands on, and the device of this rank."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]: public

# Longer than any step; a collective that takes as long is a bug or a dead rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_SECONDS_TO_DROP_TENSORS = 0.05


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
    _refuse_other_launchers()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(
            backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
        )
    atexit.register(_leave_process_group)


def check_host_collectives() -> None:
    """Raise if ranks cannot exchange memory of the host."""
    backend = dist.get_backend_config()
    if this_device().type == "cuda" and "cpu:" not in backend:
        raise ValueError(
            "data_parallel.offload has parameters and gradients in the host's memory, which norms "
            "and checkpoints exchange: expected a process group with a backend for the CPU, got "
            f"{backend!r}; call torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), or "
            "let parallelize do it"
        )


# Which environment variables other launchers number their processes by, and count them.
_OTHER_LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}


def _refuse_other_launchers() -> None:
    """Refuse to run many times alone where a launcher has started many processes."""
    if "RANK" in os.environ:
        return
    for launcher, (rank, size) in _OTHER_LAUNCHERS.items():
        if rank in os.environ and os.environ.get(size, "1") not in ("", "1"):
            raise ValueError(
                f"expected the environment that torchrun makes (RANK, WORLD_SIZE, MASTER_ADDR, "
                f"MASTER_PORT), got that of {launcher} ({rank}={os.environ[rank]}, "
                f"{size}={os.environ[size]}): each process would train alone. Have {launcher} "
                "start one torchrun a node, or set the four variables for each process"
            )


def _leave_process_group() -> None:
    if dist.is_initialized():
        # gloo's threads drop the tensors of a collective slightly after whoever waited for it goes
        # on, and need Python's lock for that: a group that is destroyed meanwhile joins them with
        # the lock held, and where Python has ended they abort the process.
        time.sleep(_SECONDS_TO_DROP_TENSORS)
        dist.destroy_process_group()
