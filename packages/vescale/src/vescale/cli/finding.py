"""One line of what ``vescale doctor`` says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ``"error"`` would end a run, ``"warn"`` may slow it down or end it later.
        text: What was found.
        remedy: What to do; empty if all is well.
    """

    name: str
    status: Literal["ok", "warn", "error"]
    text: str
    remedy: str = ""

    def of_rank(self, rank: int) -> Finding:
        """Return the finding as one of another rank."""
        return replace(self, name=f"{self.name}, rank {rank}")
