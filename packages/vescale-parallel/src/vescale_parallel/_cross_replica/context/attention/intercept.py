"""Attention that modules call, while they run, is that of slices, however they reach it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vescale_parallel._cross_replica.context.sliced.tensor import is_sliced
from vescale_parallel._torch_private import left_out

from .interface import Attends, interface_of
from .multi_head import arguments, is_usual, multi_head_attention

LEFT_OUT = "attention is to what other ranks have of the sequence, too"
_CHECKPOINT = "torch.utils.checkpoint"


class AttentionMode(TorchFunctionMode):
    """Has ``F.scaled_dot_product_attention`` be that of slices, however it was imported."""

    def __init__(self, attention: Attends) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self._attention.wants():
            return self._attention.scaled_dot_product(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward and any(map(is_sliced, args)):
            return self._of_many_heads(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _of_many_heads(self, args: Any, kwargs: Any) -> Any:
        given = arguments(args, kwargs)
        if not is_usual(given):
            return F.multi_head_attention_forward(*args, **kwargs)
        with AttentionMode(self._attention):
            return multi_head_attention(given)


class _OfThread(threading.local):
    """Whether attention is intercepted on this thread; a GPU's backward has one of its own."""

    is_intercepted = False
    attending = ""


class _OnSlices(threading.local):
    block = ""


_on_slices = _OnSlices()


def refuse_compiled_attention() -> None:
    """Refuse attention in what was compiled of a block that runs on slices now.

    Raises:
        ValueError: If there is such a block.
    """
    if _on_slices.block:
        raise ValueError(
            f"context_parallel: {_on_slices.block!r} is compiled and calls attention in a module "
            "in which it called none when a call of this form was compared with one device. Begin "
            "with a call in which all of the block attends, give calls that attend otherwise an "
            "argument of another kind, or leave compile out of the plan"
        )


class Interception:
    """Has attention be computed by another, within the forwards that it is told of.

    Nobody looks into blocks that are compiled, and modules that attend are left out of them.
    """

    def __init__(self, attention: Attends, *, compiled: bool = False) -> None:
        self._attention, self._compiled, self._here = attention, compiled, _OfThread()

    @property
    def attending(self) -> str:
        """The innermost module that runs on this thread, of those that attend."""
        return self._here.attending

    def of_block(
        self, forward: Callable[..., Any], attends: Callable[[], bool], fqn: str
    ) -> Callable[..., Any]:
        """Return the forward of a block; ``attends()`` says whether its own code is known to.

        Of one that is compiled, no other modules may attend than those that are known to.
        """
        if not self._compiled:
            return self._around(forward, lambda: True, fqn)
        attend = self._around(forward, attends, fqn)

        @functools.wraps(forward)
        def on_slices(*args: Any, **kwargs: Any) -> Any:
            held, _on_slices.block = _on_slices.block, fqn
            try:
                return attend(*args, **kwargs)
            finally:
                _on_slices.block = held

        return on_slices

    def of_module(
        self, forward: Callable[..., Any], is_now: Callable[[], bool], fqn: str
    ) -> Callable[..., Any]:
        """Return the forward of a module within, in which it is intercepted while ``is_now()``."""
        return left_out(self._around(forward, is_now, fqn), LEFT_OUT)

    def _around(
        self, forward: Callable[..., Any], is_now: Callable[[], bool], fqn: str
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            if not is_now():
                return forward(*args, **kwargs)
            here = self._here
            held = here.attending, here.is_intercepted
            here.attending, here.is_intercepted = fqn, True
            try:
                if held[1]:
                    return forward(*args, **kwargs)
                with interface_of(self._attention), AttentionMode(self._attention):
                    return forward(*args, **kwargs)
            finally:
                here.attending, here.is_intercepted = held

        made: Any = intercepted
        _intercepted.add(made.__code__)
        return made


_intercepted = set[CodeType]()


def refuse_checkpoint_within() -> None:
    """Refuse a checkpoint between a module that attends and its attention.

    It would run attention again without what intercepts it, which is around the module.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in _intercepted:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            raise ValueError(
                "context_parallel: expected torch.utils.checkpoint around the module that calls "
                "attention, or around more, got it within that module, where attention would run "
                "again on a slice alone; checkpoint the module, or use recompute='full'"
            )
        frame = frame.f_back
