"""Memory of the host that a device copies from and to while it computes.

[Note: memory of the host] With ``data_parallel.offload`` the shards that an optimizer updates, and
their gradients, are memory of the host: pinned, so that a GPU copies it while it computes. Where
ranks compute on CPUs it is memory beside that which computes, as on a GPU. Programs write to it at
any time, and no stream orders what the host does: so the host waits, where a forward or a backward
pass of a call ends and nowhere before, for the last of the copies that it asked for. By then all
but the last blocks have computed, so that a GPU still has something to do.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zeros_on_host(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that ``device`` copies from and to while it computes, 1-D."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


def empty_on_host(shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that ``device`` copies from and to while it computes."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
