"""torch's record of a process's last collectives, written where torch's own tool looks for it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from vescale_dtensor._torch_private import recorded_collectives

# Names of 2.9 and later, and of before.
_PATHS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT = "/tmp/nccl_trace_rank_"  # torch's own


def dump_flight_recorder(group: dist.ProcessGroup | None) -> str:
    """Write what NCCL's flight recorder has; return where, empty if there is none of the group.

    ``torchfrtrace`` compares the files of all ranks.
    """
    known = dist.group.WORLD if group is None else group
    assert isinstance(known, dist.ProcessGroup)
    if not torch.cuda.is_available() or "nccl" not in dist.get_backend_config(known):
        return ""
    recorded = recorded_collectives()
    if not recorded:
        return ""
    prefix = next((os.environ[name] for name in _PATHS if name in os.environ), _DEFAULT)
    path = Path(f"{prefix}{dist.get_rank()}")
    try:
        path.write_bytes(recorded)
    except OSError:
        return ""  # a full or read-only disk must not hide the error itself
    return str(path)
