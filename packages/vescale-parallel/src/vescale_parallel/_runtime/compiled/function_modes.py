"""Function modes around a compiled block: which see what it computes, which are in its graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.overrides import TorchFunctionMode

from vescale_parallel._pipeline.cuts.derived import NamesDerived
from vescale_parallel._pipeline.execution.split_backward import HookedNodes
from vescale_parallel._torch_private import function_modes

# Modes that need not see what blocks compute: they are about code between blocks, or go on without
# what they did not see. Others of ours look at the first call of a form, which then runs as it is
# written.
_PASSED_BY = (HookedNodes, NamesDerived)


def has_to_see(mode: Any) -> bool:
    """Whether a mode has to see the functions of a block one by one.

    Those of the program are in its graph, as on one device: the default device, which is one, too.
    """
    is_ours = type(mode).__module__.partition(".")[0].startswith("vescale")
    return is_ours and not isinstance(mode, _PASSED_BY)


@contextlib.contextmanager
def passed_by() -> Iterator[None]:
    """Have modes that need not see a block not see it, and the others go on."""
    modes = function_modes()
    kept = [mode for mode in modes if not isinstance(mode, _PASSED_BY)]
    if len(kept) == len(modes):
        yield
        return
    # Not what a mode itself does when it is entered and left: it has not been left.
    _take(len(modes))
    _put(kept)
    try:
        yield
    finally:
        _take(len(kept))
        _put(modes)


def _take(number: int) -> None:
    for mode in function_modes()[::-1][:number]:
        TorchFunctionMode.__exit__(mode, None, None, None)


def _put(modes: list[Any]) -> None:
    for mode in modes:
        TorchFunctionMode.__enter__(mode)
