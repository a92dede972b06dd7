"""Eager scopes: the functions of a constructor that run for real, as they cannot be deferred.

Nobody knows before it is tried. When a construction fails, the function in which it failed is
noted and the construction begins anew; tensors which that function makes are then real. What the
constructors of submodules make is still deferred, unless that fails as well: then all is real
that is made while the function runs, and in the end the function around it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Literal

from torch import nn

from .user_frame import is_user_file, user_line

_Extent = Literal["own", "all"]
_MAX_NUM_ATTEMPTS = 8


class EagerScopes:
    """Functions that run for real, as learned from failures.

    What calls ``around``, which calls the constructor, is not looked at.

    Attributes:
        reasons: Why, by their names.
    """

    def __init__(self, around: CodeType) -> None:
        self._around = around
        self._extents: dict[CodeType, _Extent] = {}
        self._attempts = 0
        self.reasons: dict[str, str] = {}

    def learn(self, error: Exception) -> bool:
        """Have more run for real; return whether that may help against ``error``."""
        self._attempts += 1
        if self._attempts == _MAX_NUM_ATTEMPTS or _was_raised_on_purpose(error.__traceback__):
            return False
        for code in _scopes(error.__traceback__, self._around):
            extent = self._extents.get(code)
            if extent != "all":
                self._extents[code] = "all" if extent == "own" else "own"
                self.reasons.setdefault(code.co_qualname, reason_of(error))
                return True
        return False

    def is_running(self) -> bool:
        """Return whether the caller was called by what is to run for real."""
        if not self._extents:
            return False
        in_submodule = False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._around:
            extent = self._extents.get(frame.f_code)
            if extent == "all" or (extent == "own" and not in_submodule):
                return True
            in_submodule = in_submodule or _constructs_module(frame)
            frame = frame.f_back
        return False


def reason_of(error: Exception) -> str:
    """Return what went wrong, and in which line of a person's code."""
    return f"{type(error).__name__}: {error} ({user_line(error)})"


def _was_raised_on_purpose(traceback: TracebackType | None) -> bool:
    """Whether a person's ``raise`` was it: that happens for real as well."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or not is_user_file(traceback.tb_frame.f_code.co_filename):
        return False
    code = traceback.tb_frame.f_code.co_code
    return dis.opname[code[traceback.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def _scopes(traceback: TracebackType | None, around: CodeType) -> Iterator[CodeType]:
    """Yield what can be run for real: where it failed, then the modules being constructed."""
    frames: list[FrameType] = []
    while traceback is not None:
        frames = [] if traceback.tb_frame.f_code is around else [*frames, traceback.tb_frame]
        traceback = traceback.tb_next
    is_innermost = True
    for frame in reversed(frames):
        if _constructs_module(frame) or (is_innermost and is_user_file(frame.f_code.co_filename)):
            is_innermost = False
            yield frame.f_code


def _constructs_module(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module)
