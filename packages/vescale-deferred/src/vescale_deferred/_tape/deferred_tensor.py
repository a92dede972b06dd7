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

from vescale_deferred._torch_private import (
    OpOverload,
    plainly,
    tree_leaves,
    tree_map,
    without_torch_function,
    wrapper,
)
from vescale_deferred.exceptions import CannotDefer, ReadError
from vescale_dtensor.random import Window

from .spectral import is_spectral
from .tape import Snapshot, Tape


class DeferredTensorMode(Protocol):
    """The mode that made a deferred tensor, as that calls it; as ``FakeTensor.fake_mode``."""

    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what ``func`` does; at least one of the tensors in its arguments is deferred."""
        ...

    def values(self, tensor: DeferredTensor, reason: str) -> Tensor:
        """Return the values of ``tensor``, or raise ReadError if this is not the time."""
        ...

    def defer(self, tensor: Tensor) -> DeferredTensor:
        """Return a deferred tensor that will have the values ``tensor`` has now."""
        ...

    def check_not_exported(self, tensor: DeferredTensor) -> None:
        """Raise CannotDefer if somebody who looks at the memory of ``tensor`` lacks a write."""
        ...

    def export(self, tensor: DeferredTensor, values: Tensor, consumer: object) -> None:
        """Watch ``values`` of ``tensor``, on whose memory ``consumer`` lies."""
        ...


@dataclass(slots=True, eq=False)
class Deferral:
    """What a deferred tensor is.

    Attributes:
        meta: Its geometry, on the meta device.
        tape: What was written to its storage.
        mode: The one that made it, and records what happens to it.
        fqn: Its first name in the module that was deferred.
        made: What ``materialize`` put in its place.
    """

    meta: Tensor
    tape: Tape
    mode: DeferredTensorMode
    fqn: str | None = None
    made: Tensor | None = None

    def snapshot(self) -> Snapshot:
        """Return the tensor as it is now."""
        return Snapshot(self.tape, self.tape.version, Window.of(self.meta))


class DeferredTensor(torch.Tensor):
    """A tensor that knows how it would have been initialised, and has no values."""

    deferral: Deferral

    def __new__(cls, meta: Tensor, tape: Tape, mode: DeferredTensorMode) -> Self:
        tensor = wrapper(cls, meta, tape.device)
        tensor.deferral = Deferral(meta, tape, mode)
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
            tape = memo.get(id(deferral.tape))
            if tape is None:
                tape = memo[id(deferral.tape)] = deferral.tape.fork()
            meta = Window.of(deferral.meta).on(tape.meta.untyped_storage())
        result = type(self)(meta, tape, deferral.mode)
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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if func in _READERS and isinstance(args[0], DeferredTensor):
                return _read(func, args[0], args[1:], kwargs or {})
            if func in _NEED_MEMORY and isinstance(args[0], DeferredTensor):
                if func is torch.Tensor.data_ptr and _recurrent_layer_asks():
                    return 0
                raise ReadError(unreadable(args[0], func.__name__))
            if func is torch.Tensor.untyped_storage and isinstance(args[0], DeferredTensor):
                return DeferredStorage(args[0])
            if func == SET_DATA:  # a new object each time
                return assign_data(*args)
            if is_spectral(func, args, kwargs or {}) and not is_differentiated(args):
                return _on_values(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, DeferredTensor))
        return first.deferral.mode.dispatch(func, args, kwargs or {})


# Methods that reach for a tensor's memory without passing the dispatcher.
_READERS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
)
# Methods that would crash, or lie, because there is no memory. Constructors that call one run for
# real, see eager_scopes.py.
_NEED_MEMORY: frozenset[Any] = frozenset(
    {
        torch.Tensor.data_ptr,
        torch.Tensor.share_memory_,
        torch.Tensor.apply_,
        torch.Tensor.storage,
    }
)
# Only a comprehension is between it and the tensor's method.
_FRAMES_OF_FLATTENING = 4
SET_DATA: Any = vars(torch.Tensor.__mro__[1])["data"].__set__


class DeferredStorage:
    """The storage of a deferred tensor: its size can be asked, and whether it is another's."""

    def __init__(self, tensor: DeferredTensor) -> None:
        self._tensor = tensor
        self._cdata = tensor.deferral.tape.key
        self.device = tensor.deferral.tape.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeferredStorage) and self._cdata == other._cdata

    def __hash__(self) -> int:
        return hash(self._cdata)

    def nbytes(self) -> int:
        """Return its size."""
        return self._tensor.deferral.tape.nbytes

    size = __len__ = nbytes

    def __getattr__(self, name: str) -> Any:
        raise ReadError(unreadable(self._tensor, f"untyped_storage().{name}"))

    def __getitem__(self, index: object) -> Any:
        raise ReadError(unreadable(self._tensor, "untyped_storage()[...]"))

    __setitem__ = __iter__ = __getitem__


def _read(
    func: Callable[..., Any], tensor: DeferredTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method that reads the memory of ``tensor``, and may lie on it from then on."""
    mode = tensor.deferral.mode
    values = mode.values(tensor, getattr(func, "__name__", "read"))
    result = func(values, *args, **kwargs)
    if func is not torch.Tensor.tolist:
        mode.export(tensor, values, result)
    return result


def is_differentiated(args: tuple[Any, ...]) -> bool:
    """Whether autograd will record a call."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on the values of its arguments, and defer its results."""
    leaves = tree_leaves((args, kwargs))
    mode = next(leaf for leaf in leaves if isinstance(leaf, DeferredTensor)).deferral.mode
    name = getattr(func, "__name__", "a function")

    def real(leaf: Any) -> Any:
        return mode.values(leaf, name) if isinstance(leaf, DeferredTensor) else leaf

    real_args, real_kwargs = tree_map(real, (args, kwargs))
    with plainly():
        result = func(*real_args, **real_kwargs)
        return tree_map(lambda t: mode.defer(t) if isinstance(t, Tensor) else t, result)


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
    fqn, storage_fqn = tensor.deferral.fqn, tensor.deferral.tape.fqn
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
        mode = tensor.deferral.mode
        if not isinstance(value, DeferredTensor):
            value = mode.defer(value)
        tensor.deferral.meta = value.deferral.meta
        tensor.deferral.tape = value.deferral.tape
    elif isinstance(value, DeferredTensor):
        raise CannotDefer(
            f"a real {type(tensor).__name__} cannot take over the memory of a deferred tensor of "
            f"shape {tuple(value.shape)}, which has none yet"
        )
    with without_torch_function():
        SET_DATA(tensor, value)
