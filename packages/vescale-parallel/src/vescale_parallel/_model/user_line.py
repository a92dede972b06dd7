"""Warnings that point at the user's own line, however deep in this package they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# Top-level packages whose frames lie between the user's line and what warns there.
_BETWEEN = {"contextlib", "functools", "torch", "vescale"}


def warn_at_user_line(message: str) -> None:
    """Warn at the innermost line that is neither torch's nor this project's.

    Python's default filter shows such a warning once for each of the user's lines.
    """
    frame = _user_frame()
    warnings.warn_explicit(
        message,
        UserWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def user_line() -> tuple[str, int]:
    """Return the file and number of the line that :func:`warn_at_user_line` points at."""
    frame = _user_frame()
    return frame.f_code.co_filename, frame.f_lineno


def _user_frame() -> FrameType:
    """Return the user's frame; the outermost one in a thread of torch's, which has none."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_between(frame):
        frame = frame.f_back
    return frame


def _is_between(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _BETWEEN or package.startswith("vescale_")
