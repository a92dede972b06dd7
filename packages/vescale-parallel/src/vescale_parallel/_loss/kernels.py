"""What computes a mean over targets, seen where no function mode sees it.

[Note: where losses are seen]
A :class:`~torch.overrides.TorchFunctionMode` costs about two microseconds for every torch function
of a forward, and nearly all of these are in the blocks of a model, where losses are rare. So the
mode that counts targets leaves while a block runs (:func:`leave_in_blocks`), which is faster and
loses nothing: ``F.cross_entropy`` and ``F.nll_loss`` look the kernel that they end in up by name
at every call, and while a model runs that name stands for :func:`_heard`, which tells whoever
listens on this thread. A loss within a block is found there, whether it was ever called before or
not.

The mode stays outside of the blocks, and in blocks that are compiled: torch.compile sees modes,
and compiles again where they differ, but not what a name stands for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vescale_parallel._torch_private import is_in_compiled_function, loss_kernels

_NAMES = ("cross_entropy_loss", "nll_loss_nd")  # of F.cross_entropy and F.nll_loss


class Listener(Protocol):
    """Computes losses in place of kernels, and is told where blocks begin and end."""

    def of_kernel(
        self,
        kernel: Callable[..., Tensor],
        given: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore_index: int,
        *more: Any,
    ) -> Tensor:
        """Return what the kernel is to return."""
        ...

    def leave(self, block: nn.Module) -> None:
        """Leave the mode, before a block."""
        ...

    def come_back(self, block: nn.Module) -> None:
        """Enter the mode again, behind a block, if it was left there."""
        ...


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.listeners: list[Any] = []


_here = _OfThread()
_lock = threading.Lock()
_plain: dict[str, Callable[..., Tensor]] = {}
_num_listeners = 0


def innermost() -> Any:
    """Return the listener of the innermost model that runs on this thread; None without one."""
    return _here.listeners[-1] if _here.listeners else None


def begin(listener: Listener) -> None:
    """Tell a listener of this thread's losses from now on, and no other one."""
    global _num_listeners
    _here.listeners.append(listener)
    with _lock:
        _num_listeners += 1
        if _num_listeners == 1:
            for name in _NAMES:
                _plain[name] = getattr(loss_kernels, name)
                setattr(loss_kernels, name, functools.partial(_heard, _plain[name]))


def end() -> None:
    """Tell the innermost listener of this thread nothing more."""
    global _num_listeners
    _here.listeners.pop()
    with _lock:
        _num_listeners -= 1
        if _num_listeners == 0:
            for name in _NAMES:
                setattr(loss_kernels, name, _plain.pop(name))


@contextlib.contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """Tell a listener of this thread's losses, while no mode sees them."""
    begin(listener)
    try:
        yield
    finally:
        end()


def _heard(
    kernel: Callable[..., Tensor],
    given: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    *more: Any,
) -> Tensor:
    listener = innermost()
    if listener is None:  # another thread's model runs
        return kernel(given, target, weight, reduction, ignore_index, *more)
    return listener.of_kernel(kernel, given, target, weight, reduction, ignore_index, *more)


def leave_in_blocks(model: nn.Module, blocks: Sequence[str]) -> None:
    """Have listeners leave their mode while blocks run, by hooks around all others."""

    def before(block: nn.Module, _: Any) -> None:
        if not is_in_compiled_function() and (listener := innermost()) is not None:
            listener.leave(block)

    def after(block: nn.Module, _: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and (listener := innermost()) is not None:
            listener.come_back(block)

    for fqn in blocks:
        block = model.get_submodule(fqn)
        block.register_forward_pre_hook(before, prepend=True)
        block.register_forward_hook(after, always_call=True)
