"""Hooks on a distributed tensor, which are called for gradients alone.

A backward pass comes to every leaf of a graph, also where an ``autograd.Function`` on the way has
returned None: torch then calls a leaf's hooks with None, and those behind accumulation as if it
had accumulated. A graph that a parallel engine makes may hold parameters so that they can be asked
for, by ``backward(inputs=...)``, and give them nothing in other passes, of which hooks are not to
hear.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor


class GradientHooks:
    """Mixed into the distributed tensor, before its base."""

    _was_given_gradient: bool = True

    def register_hook(self: Any, hook: Callable[[Tensor], Any]) -> Any:
        """Call ``hook`` with every gradient of this tensor; it may return another one."""
        return Tensor.register_hook(self, functools.partial(_call, hook))

    def register_post_accumulate_grad_hook(self: Any, hook: Callable[[Any], None]) -> Any:
        """Call ``hook`` with this tensor after a gradient was added to its ``.grad``."""
        if not self._post_accumulate_grad_hooks:
            Tensor.register_hook(self, functools.partial(_note, weakref.ref(self)))
        behind = functools.partial(_call_behind, hook)
        return Tensor.register_post_accumulate_grad_hook(self, behind)


def _call(hook: Callable[[Tensor], Any], grad: Tensor | None) -> Any:
    return None if grad is None else hook(grad)


def _note(held: weakref.ref[Any], grad: Tensor | None) -> None:
    tensor = held()
    if tensor is not None:
        tensor._was_given_gradient = grad is not None


def _call_behind(hook: Callable[[Any], None], tensor: Any) -> None:
    if tensor._was_given_gradient:
        hook(tensor)
