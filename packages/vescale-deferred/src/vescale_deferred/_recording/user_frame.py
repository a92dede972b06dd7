"""The user's frame: which line of a person's code are we in?"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import vescale_dtensor

_OURS = str(Path(__file__).parents[1])
_DTENSOR = str(Path(vescale_dtensor.__file__).parent)
_TORCHS = str(Path(sys.modules["torch"].__file__ or "").parent)


def user_line(error: BaseException | None = None) -> str:
    """Return file and line of the innermost frame that is neither ours nor torch's."""
    if error is None:
        stack = traceback.extract_stack()
    else:
        stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if is_user_file(f.filename)] or list(stack)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def is_user_file(filename: str) -> bool:
    """Return whether a file is neither ours nor torch's."""
    return not filename.startswith((_OURS, _DTENSOR, _TORCHS))
