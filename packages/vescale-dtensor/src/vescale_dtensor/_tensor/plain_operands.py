"""Plain tensors that operators take beside distributed ones, told to whoever wants to know.

They count as the same on all ranks. Nobody can see on one rank whether they are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload

# Of an operator, its plain tensors and its distributed ones.
Told = Callable[[OpOverload, Sequence[Tensor], Sequence[Any]], None]


class _Here(threading.local):
    """Of this thread, which is a rank of its own in tests."""

    def __init__(self) -> None:
        self.methods: list[weakref.WeakMethod[Told]] = []
        self.is_told = False


here = _Here()


def tell_plain_operands(told: Told) -> Callable[[], None]:
    """Have a method called with the plain tensors that operators take beside distributed ones.

    On this thread, outside of :func:`untold`.

    Args:
        told: A bound method, for as long as its object lives.

    Returns:
        What ends it.
    """
    here.methods.append(weakref.WeakMethod(told))
    here.is_told = True

    def stop() -> None:
        here.methods = [each for each in here.methods if each() not in (None, told)]
        here.is_told = bool(here.methods)

    return stop


@contextmanager
def untold() -> Iterator[None]:
    """Tell nobody, within."""
    before, here.is_told = here.is_told, False
    try:
        yield
    finally:
        here.is_told = before and bool(here.methods)


def tell(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Tell those who want to know of a call of an operator."""
    tensors = [*_tensors(args), *_tensors(kwargs.values())] if kwargs else [*_tensors(args)]
    plain = [each for each in tensors if type(each) in (Tensor, nn.Parameter)]
    if not plain:
        return
    distributed = [each for each in tensors if isinstance(each, DISTRIBUTED)]
    for method in here.methods:
        told = method()
        if told is not None:
            told(func, plain, distributed)


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator was given: one each, or lists of them.

    Not pytree: it takes longer than the rest of a call, with every step of an optimizer.
    """
    for each in given:
        if isinstance(each, Tensor):
            yield each
        elif type(each) in (list, tuple):
            yield from _tensors(each)
