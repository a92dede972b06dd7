"""Wait for the ranks of a collective, and look now and then whether they can come at all.

gloo waits for its timeout, half an hour, and ends the process where sizes differ. Whoever can
tell earlier that ranks will not meet says so from a function that is called while this rank waits.
The collective is left then, and would pair with the next one: its process group is abandoned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = timedelta(seconds=1)

_abandoned: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class _Looks(threading.local):
    """Of this thread, which is a rank of its own in tests."""

    def __init__(self) -> None:
        self.methods: list[weakref.WeakMethod[Callable[[], None]]] = []


_looks = _Looks()


def while_waiting(look: Callable[[], None]) -> None:
    """Have a method called about every second while this thread waits in a collective on a CPU.

    Args:
        look: A bound method, for as long as its object lives. If it raises, the wait ends, and
            the collective's process group is abandoned.
    """
    _looks.methods = [each for each in _looks.methods if each() is not None]
    _looks.methods.append(weakref.WeakMethod(look))


def abandon(group: dist.ProcessGroup, why: str) -> None:
    """Refuse all further collectives over a process group in which ranks left one."""
    _abandoned[group] = why


def run_collective(
    collective: Callable[..., Any],
    out: torch.Tensor,
    *rest: Any,
    group: dist.ProcessGroup | None,
) -> None:
    """Run a collective of torch.distributed to its end."""
    refuse_abandoned(group)
    if not _looks.methods or out.device.type != "cpu":
        collective(out, *rest, group=group)
    else:
        finish(collective(out, *rest, group=group, async_op=True), out, group)


def refuse_abandoned(group: dist.ProcessGroup | None) -> None:
    """Raise if a process group was abandoned."""
    why = _abandoned.get(group) if _abandoned and group is not None else None
    if why is not None:
        raise RuntimeError(
            f"the process group is of no more use, for {why}, and the program went on; it has to "
            "be started again"
        )


def finish(work: dist.Work | None, out: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective that writes to ``out``."""
    if work is None:
        return
    while _looks.methods and out.device.type == "cpu":
        try:
            work.wait(_PATIENCE)
            return
        except RuntimeError:
            if work.is_completed():  # it failed
                raise
        try:
            for each in _looks.methods:
                look = each()
                if look is not None:
                    look()
        except Exception:
            if group is not None:
                abandon(group, "this rank left a collective of it")
            raise
    work.wait()
