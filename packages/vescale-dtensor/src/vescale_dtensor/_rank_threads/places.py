"""Where in the user's program a thread is."""

from __future__ import annotations

import sys
import threading
from types import FrameType

_NOT_THE_PROGRAM = {"contextlib", "functools", "threading", "torch", "vescale_dtensor"}


def place_in_program(thread: threading.Thread | None) -> str:
    """Return the file, line and function that the user would look at; empty if there is none."""
    ident = None if thread is None else thread.ident
    frame = None if ident is None else sys._current_frames().get(ident)
    first = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in _NOT_THE_PROGRAM:
            if not name.startswith("vescale"):
                return _said(frame)
            first = first or _said(frame)
        frame = frame.f_back
    return first


def _said(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
