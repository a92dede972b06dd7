"""The mode in which a constructor runs, so that no tensor in it gets memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vescale_deferred._evaluation.replay import values
from vescale_deferred._tape.deferred_tensor import DeferredTensor, unreadable
from vescale_deferred._tape.op_schema import GEOMETRY_ONLY, aten, op_schema
from vescale_deferred._torch_private import (
    OpOverload,
    TorchDispatchMode,
    is_tracing,
    plainly,
    tree_leaves,
)
from vescale_deferred.exceptions import DeferredError, ReadError

from .buffer_exports import BufferExports
from .eager_scopes import EagerScopes
from .function_mode import ConstructionFunctionMode
from .generators import Generators
from .recorder import Recorder

# What may happen to deferred tensors when their constructor is done: other places to see the same
# storage, copies with another dtype or device; and GEOMETRY_ONLY.
_COPIES = aten("_to_copy clone lift_fresh _has_compatible_shallow_copy_type")


class ConstructionMode(TorchDispatchMode):
    """The dispatch mode of a constructor: records it, and looks after its tensors when left."""

    def __init__(self, eager_scopes: EagerScopes | None = None) -> None:
        super().__init__()
        self.generators = Generators()
        self._eager_scopes = eager_scopes
        self._function_mode = ConstructionFunctionMode()
        self._exports = BufferExports()
        self._is_open = False

    def __enter__(self) -> ConstructionMode:
        self._is_open = True
        super().__enter__()
        self._function_mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._function_mode.__exit__(*exception)
        super().__exit__(*exception)
        self._is_open = False
        if exception[0] is None:  # after an error the construction begins anew
            self._exports.settle()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_tracing():
            return func(*args, **(kwargs or {}))
        with plainly():
            recorder = Recorder(self, self.generators, self._eager_scopes)
            return recorder.call(func, args, kwargs or {})

    def dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record what still makes sense now that the constructor is done."""
        op = op_schema(func)
        generators = Generators()
        recorder = Recorder(self, generators)
        if op.name in GEOMETRY_ONLY:
            with plainly():
                return _like(func, args, kwargs)
        targets = [args[position] for position, _ in op.mutated if position < len(args)]
        is_write = bool(targets) and all(isinstance(t, DeferredTensor) for t in targets)
        if is_write:
            _check_not_made(targets)
        if is_write or op.name in _COPIES or op.is_view:
            with plainly():
                try:
                    return recorder.call(func, args, kwargs)
                finally:
                    generators.settle()
        leaves = tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, DeferredTensor))
        raise ReadError(unreadable(first, op.name))

    def values(self, tensor: DeferredTensor, reason: str) -> Tensor:
        """Return the values of ``tensor`` if the constructor is still running."""
        if not self._is_open:
            raise ReadError(unreadable(tensor, reason))
        return values(tensor)

    def export(self, tensor: DeferredTensor, values: Tensor, consumer: object) -> None:
        """Note who looks at the memory of ``values``, which are those of ``tensor``."""
        self._exports.add(tensor.deferral.tape, values, consumer)

    def check_not_exported(self, tensor: DeferredTensor) -> None:
        """Raise CannotDefer if somebody would not see a write to ``tensor``."""
        self._exports.check(tensor.deferral.tape)

    def defer(self, tensor: Tensor) -> DeferredTensor:
        """Return a deferred tensor with the values of ``tensor``."""
        with plainly():
            return Recorder(self, self.generators).defer(tensor)


def _check_not_made(targets: list[DeferredTensor]) -> None:
    for tensor in targets:
        deferral = tensor.deferral
        if deferral.made is not None or deferral.tape.storage is not None:
            raise DeferredError(
                f"{(deferral.fqn or deferral.tape.fqn)!r} has been materialised; write to the "
                "tensor that is in the module now, not to the deferred one"
            )


def _like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a real tensor that has taken only its geometry from a deferred one."""
    device = kwargs.get("device") or args[0].device
    return func(args[0].deferral.meta, *args[1:], **{**kwargs, "device": device})
