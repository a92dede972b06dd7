"""How much memory this process has had at most."""

from __future__ import annotations

from pathlib import Path


def peak_nbytes(*, reset: bool = False) -> int:
    """Return the most memory that this process has ever had, or has had since the reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
