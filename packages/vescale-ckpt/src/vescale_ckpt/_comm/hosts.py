"""What the ranks of one host share: a page cache and processors."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """Return what processes have in common if one kernel reads files for them."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()


def processors_each(hosts: Sequence[str]) -> int:
    """Return how many processors each rank of this host may keep busy."""
    on_linux = hasattr(os, "sched_getaffinity")
    available = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    return max(1, available // hosts.count(this_host()))
