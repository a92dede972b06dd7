"""Transformers' attention interface, of which blocks get attention of slices while they run.

A model looks up its attention function by ``AttentionInterface.get_interface`` in every call, be
it eager, ``sdpa`` or registered by somebody; before transformers 5 by an index, and not the eager
one, which is attention that is written out. While a block of a sliced sequence runs that method
stands for one that wraps what it finds, on this thread; so functions see whole sequences of some
heads, and decide by them (``sdpa`` takes a query of one position for a step of generation).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

_MODULE = "transformers.modeling_utils"
_LOOKS_UP = ("get_interface", "__getitem__")  # of transformers 5, of 4


class Attends(Protocol):
    """Computes attention in place of the functions that are called for it."""

    def scaled_dot_product(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stand for ``F.scaled_dot_product_attention``."""
        ...

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand for the function of this name in transformers' attention interface."""
        ...

    def wants(self) -> bool:
        """Whether attention that is called now is to be computed here."""
        ...


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.running: list[Attends] = []


_here = _OfThread()
_lock = threading.Lock()
_plain: list[Callable[..., Any]] = []
_num_running = 0


@contextlib.contextmanager
def interface_of(attention: Attends) -> Iterator[None]:
    """Have functions of the attention interface that are looked up here be those of slices."""
    global _num_running
    interface = getattr(sys.modules.get(_MODULE), "AttentionInterface", None)
    looks_up = next((each for each in _LOOKS_UP if hasattr(interface, each)), None)
    if looks_up is None:  # nobody imported transformers, or there is no interface before 4.50
        yield
        return
    _here.running.append(attention)
    with _lock:
        _num_running += 1
        if _num_running == 1:
            _plain[:] = [getattr(interface, looks_up)]
            setattr(interface, looks_up, _looked_up)
    try:
        yield
    finally:
        _here.running.pop()
        with _lock:
            _num_running -= 1
            if _num_running == 0:
                setattr(interface, looks_up, _plain.pop())


def _looked_up(interface: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    name = args[0] if args else kwargs.get("attn_implementation")
    found = _plain[0](interface, *args, **kwargs)
    if not _here.running or not _here.running[-1].wants():
        return found
    if "flash" in str(name):
        raise ValueError(
            f"context_parallel: attention {name!r} reads packed documents from positions, of "
            "which a rank has a slice; use attn_implementation='sdpa'"
        )
    return functools.partial(_here.running[-1].of_interface, found, str(name))
