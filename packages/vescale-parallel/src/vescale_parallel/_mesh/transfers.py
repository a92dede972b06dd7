"""What ranks send from one to another, told to whoever listens.

Collectives are counted where they are made, in ``vescale_dtensor``; these are sends from rank to
rank, which torch is called for directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from vescale_dtensor import own_list

Sent = Literal["send activations", "send gradients", "send tied weights", "send slices"]
_listeners: list[Callable[[Sent, int], None]] = []
own_list(_listeners)


@contextmanager
def listening(listener: Callable[[Sent, int], None]) -> Iterator[None]:
    """Call ``listener`` with what this rank sends to another one, and its bytes."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell_sent(what: Sent, tensor: Tensor) -> None:
    """Let listeners know of a tensor that this rank sends."""
    for listener in _listeners:
        listener(what, tensor.numel() * tensor.element_size())
