"""The scripts, and the lines that each one needs."""

from __future__ import annotations

from . import fabric, karpathy, language_models, pytorch_examples, vision
from .program import Program

PROGRAMS: tuple[Program, ...] = (
    *karpathy.PROGRAMS,
    *language_models.PROGRAMS,
    *fabric.PROGRAMS,
    *pytorch_examples.PROGRAMS,
    *vision.PROGRAMS,
)
