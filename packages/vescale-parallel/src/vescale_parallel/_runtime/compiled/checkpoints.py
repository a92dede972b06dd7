"""Calls of a block that torch.utils.checkpoint repeats in backward, alike in both.

[Note: repeated calls] Programs may have blocks repeated in backward, by torch.utils.checkpoint.
What autograd keeps in the second call stands for what it kept in the first, by number: so both
have to be of the same operators, compiled or as written. The first one may be looked at by a mode
that is long gone in backward. Its way is noted with the object that torch has for each region that
it repeats.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from vescale_parallel._torch_private import saved_tensors_hooks_in_force


class RepeatedCalls:
    """How the calls of one block ran that are to be repeated: as written, or compiled."""

    def __init__(self) -> None:
        """Begin with none."""
        self._as_written = weakref.WeakKeyDictionary[Any, bool]()

    def runs_as_written(self, decide: Callable[[], bool]) -> bool:
        """Return whether a call runs as it is written: as its first run did, or as is decided."""
        region = _region()
        if region is None:
            return decide()
        found = self._as_written.get(region)
        if found is None:
            found = self._as_written[region] = decide()
        return found

    def note_as_written(self) -> None:
        """Note that a call ran as it is written after all, since it could not be compiled."""
        region = _region()
        if region is not None:
            self._as_written[region] = True


def _region() -> Any:
    """Return torch.utils.checkpoint's object for the region that runs, now or again, if any.

    Its hook of what autograd keeps holds the object, in backward by a weak reference.
    """
    hooks = saved_tensors_hooks_in_force(False)
    pack = inspect.unwrap(hooks[0]) if hooks else None
    if getattr(pack, "__module__", None) != "torch.utils.checkpoint":
        return None
    for cell in getattr(pack, "__closure__", None) or ():
        held = cell.cell_contents
        held = held() if isinstance(held, weakref.ref) else held
        if type(held).__module__ == "torch.utils.checkpoint" and hasattr(held, "recompute_fn"):
            return held
    return None
