"""What this package raises besides ``TypeError`` and ``ValueError``.

DeferredError
  ReadError       a value was asked of a tensor that has none yet
  CannotDefer     an operation that cannot be recorded
"""

from __future__ import annotations


class DeferredError(RuntimeError):
    """Something went wrong because a tensor is deferred."""


class ReadError(DeferredError):
    """A value of a deferred tensor was needed outside its constructor."""


class CannotDefer(DeferredError):
    """An operation cannot be recorded; the module has to be constructed for real."""


class DeferredWarning(UserWarning):
    """Something was constructed for real although it should have been deferred."""
