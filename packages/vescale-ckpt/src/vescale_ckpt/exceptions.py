"""What this package raises.

ValueError
  CheckpointError            a save or load could not be done; nothing was committed
    CorruptCheckpointError   the files are damaged, incomplete or not a checkpoint
    MismatchError            keys, shapes, dtypes or values do not fit together

An error on one rank is raised on every rank, with the class of the first rank that failed.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint could not be saved or loaded."""


class CorruptCheckpointError(CheckpointError):
    """The files of a checkpoint are damaged, incomplete, or no checkpoint at all."""


class MismatchError(CheckpointError):
    """Two sides that must agree do not: state and checkpoint, or rank and rank."""
