"""What does a tensor without values look like from outside?

A :class:`DeferredTensor` reports geometry, dtype and device, takes part in whatever a module does
with its parameters without reading them, and refuses the rest with its name.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from vescale_dtensor.random import Window

from ._history import History, Source
from ._torch_private import OpOverload, plainly, tree_leaves, without_torch_function, wrapper
from .exceptions import ReadError


class Recorder(Protocol):
    """Who records what happens to deferred tensors."""

    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what ``func`` does; at least one of the tensors in its arguments is deferred."""
        ...

    def values(self, tensor: DeferredTensor, reason: str) -> Tensor:
        """Return the values of ``tensor``, or raise ReadError if this is not the time."""
        ...

    def defer(self, tensor: Tensor) -> DeferredTensor:
        """Return a deferred tensor that will have the values ``tensor`` has now."""
        ...


@dataclass(slots=True, eq=False)
class Deferral:
    """What a deferred tensor is.

    Attributes:
        meta: Its geometry, on the meta device.
        history: What was written to its storage.
        recorder: Who records what happens to it.
        fqn: Its first name in the module that was deferred.
        made: What ``materialize`` put in its place.
    """

    meta: Tensor
    history: History
    recorder: Recorder
    fqn: str | None = None
    made: Tensor | None = None

    def source(self) -> Source:
        """Return the tensor as it is now."""
        return Source(self.history, self.history.version, Window.of(self.meta))


class DeferredTensor(torch.Tensor):
    """A tensor that knows how it would have been initialised, and has no values."""

    deferral: Deferral

    def __new__(cls, meta: Tensor, history: History, recorder: Recorder) -> Self:
        tensor = wrapper(cls, meta, history.device)
        tensor.deferral = Deferral(meta, history, recorder)
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; ``__new__`` has done it.

        ``torch.Tensor(3, 4)`` comes here too, with its arguments, while a constructor is recorded.
        """

    def __repr__(self, *, tensor_contents: object = None) -> str:
        name = "Parameter" if isinstance(self, torch.nn.Parameter) else "tensor"
        fqn = self.deferral.fqn
        about = "" if fqn is None else f", fqn={fqn!r}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"deferred {name}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={str(self.device)!r}{grad}{about})"
        )

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if format_spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        deferral = self.deferral
        with plainly():
            history = memo.get(id(deferral.history))
            if history is None:
                history = memo[id(deferral.history)] = deferral.history.fork()
            meta = Window.of(deferral.meta).on(history.meta.untyped_storage())
        result = type(self)(meta, history, deferral.recorder)
        result.requires_grad_(self.requires_grad)
        result.deferral.fqn = deferral.fqn
        memo[id(self)] = result
        for name, value in vars(self).items():
            if name != "deferral":
                setattr(result, name, copy.deepcopy(value, memo))
        return result

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ReadError(unreadable(self, "pickled"))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with without_torch_function():
            if func in _READERS and isinstance(args[0], DeferredTensor):
                recorder = args[0].deferral.recorder
                values = recorder.values(args[0], getattr(func, "__name__", "read"))
                return func(values, *args[1:], **(kwargs or {}))
            if func in _NEED_MEMORY and isinstance(args[0], DeferredTensor):
                if func is torch.Tensor.data_ptr and _recurrent_layer_asks():
                    return 0
                raise ReadError(unreadable(args[0], func.__name__))
            if func == _SET_DATA:  # a new object each time
                return assign_data(*args)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, DeferredTensor))
        return first.deferral.recorder.dispatch(func, args, kwargs or {})


# Methods that reach for a tensor's memory without passing the dispatcher.
_READERS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
)
# Methods that would crash, or lie, because there is no memory. Constructors that call one run for
# real, see _real_code.py.
_NEED_MEMORY = frozenset({torch.Tensor.data_ptr, torch.Tensor.share_memory_, torch.Tensor.apply_})
# Only a comprehension is between it and the tensor's method.
_FRAMES_OF_FLATTENING = 4
_SET_DATA: Any = vars(torch.Tensor.__mro__[1])["data"].__set__


def _recurrent_layer_asks() -> bool:
    """Whether ``nn.RNNBase.flatten_parameters`` wants to know whether weights share memory.

    On a GPU recurrent layers lay their weights out as one chunk, but not if their addresses are
    the same. For them that is 0; :func:`vescale_deferred.materialize` asks them once more.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_OF_FLATTENING):
        if frame is None or frame.f_code is nn.RNNBase.flatten_parameters.__code__:
            return frame is not None
        frame = frame.f_back
    return False


def copy_attributes(tensor: Tensor, other: Tensor) -> None:
    """Give ``other``, a real tensor, the Python attributes that were set on ``tensor``."""
    for name, value in vars(tensor).items():
        # Deferred parameters are marked; real ones have a class of their own.
        if name not in ("deferral", "_is_param"):
            setattr(other, name, value)


def unreadable(tensor: DeferredTensor, reason: str) -> str:
    """Return why a value of ``tensor`` cannot be had, and what to do."""
    fqn, storage_fqn = tensor.deferral.fqn, tensor.deferral.history.fqn
    if fqn is not None:
        name = repr(fqn)
    else:
        name = "this tensor" if storage_fqn is None else f"this view of {storage_fqn!r}"
    return (
        f"{name} is deferred: it has shape {tuple(tensor.shape)} and dtype {tensor.dtype} but no "
        f"values yet, so it cannot be used in {reason}; call vescale_deferred.materialize(module) "
        "first, or vescale_deferred.read(tensor) for a copy of its values"
    )


def assign_data(tensor: Tensor, value: Tensor) -> None:
    """Do ``tensor.data = value`` where at least one of the two is deferred."""
    if isinstance(tensor, DeferredTensor):
        recorder = tensor.deferral.recorder
        if not isinstance(value, DeferredTensor):
            value = recorder.defer(value)
        tensor.deferral.meta = value.deferral.meta
        tensor.deferral.history = value.deferral.history
    elif isinstance(value, DeferredTensor):
        value = value.deferral.recorder.values(value, "data")
    with without_torch_function():
        _SET_DATA(tensor, value)
