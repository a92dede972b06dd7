"""Collectives as a compiler sees them: operators that return new tensors.

torch.compile runs a program on tensors without data to record its operators. The ordinary
collectives write into buffers behind its back; these are operators like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_functional: Any = torch.ops._c10d_functional


def is_traced(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for data that a compiled program will have."""
    return type(tensor) is not Tensor and type(tensor) is not nn.Parameter


def all_gather(part: Tensor, num_ranks: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks along dim 0, in the order of group ranks."""
    gathered = _functional.all_gather_into_tensor(part, num_ranks, group.group_name)
    return _functional.wait_tensor(gathered)


def all_to_all(
    sent: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Return what the ranks sent here along dim 0, in the order of group ranks."""
    received = _functional.all_to_all_single(
        sent, list(received_sizes), list(sent_sizes), group.group_name
    )
    return _functional.wait_tensor(received)
