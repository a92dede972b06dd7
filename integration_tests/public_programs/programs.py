"""The scripts, and the lines that each one needs."""

from __future__ import annotations

from . import karpathy
from .program import Program

PROGRAMS: tuple[Program, ...] = (*karpathy.PROGRAMS,)
