"""What does an operator do to tensors without values? Record the call, and say the geometry.

The geometry comes from running the operator on the meta device. Where that is not possible,
because it depends on values or has no such kernel, the operator runs early on the values of its
arguments, and its results are recorded as constants.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from vescale_deferred._evaluation.partial_replay import any_true, replay_part
from vescale_deferred._evaluation.replay import values
from vescale_deferred._evaluation.value_bounds import known_truth
from vescale_deferred._tape.deferred_tensor import DeferredTensor, DeferredTensorMode, assign_data
from vescale_deferred._tape.op_schema import GEOMETRY_ONLY, OpSchema, aten, op_schema
from vescale_deferred._tape.tape import OpCall, Snapshot, Tape, Write
from vescale_deferred._torch_private import OpOverload, schema, storage_key, tree_leaves, tree_map
from vescale_deferred.exceptions import CannotDefer, DeferredWarning
from vescale_dtensor.random import Draws, PhiloxDraws, Point, Window

from .eager_scopes import EagerScopes
from .generators import Generators
from .meta_outputs import META, can_be_deferred, device_of_outputs, outputs_on_meta
from .random_draws import draw_on_cpu, draw_on_cuda
from .user_frame import user_line

_GEOMETRY_CHANGES = aten("as_strided_ squeeze_ t_ transpose_ unsqueeze_")

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


class Recorder:
    """Records the operator calls of one construction; to be used within ``plainly()``."""

    def __init__(
        self,
        mode: DeferredTensorMode,
        generators: Generators,
        eager_scopes: EagerScopes | None = None,
    ) -> None:
        self._mode = mode
        self._generators = generators
        self._eager_scopes = eager_scopes

    def call(self, func: OpOverload, args: _Args, kwargs: _Kwargs) -> Any:
        """Do what ``func`` does, without values as far as possible."""
        op = op_schema(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        deferred = [tensor for tensor in tensors if isinstance(tensor, DeferredTensor)]
        if op.name == "aten::_local_scalar_dense" and deferred:
            return _scalar(deferred[0])
        if op.name == "aten::_has_compatible_shallow_copy_type":
            return len(deferred) == 2
        device = device_of_outputs(deferred, kwargs)
        # A tensor on the meta device that only lends its geometry does not make another one real.
        is_like_meta = (
            op.name in GEOMETRY_ONLY
            and kwargs.get("device") is not None
            and all(tensor.is_meta for tensor in tensors)
        )
        stays = (tensors and not is_like_meta) or not op.has_device or device == META
        if not deferred and (stays or self._is_real()):
            return self._run(op, func, args, kwargs)
        if op.changes_geometry:
            return _change_geometry(op, func, args, kwargs)
        mutated = _mutated(op, args, kwargs)
        if any(type(tensor) is not DeferredTensor for tensor in mutated):
            return self._run_eagerly(op, func, args, kwargs, mutated)
        outputs = outputs_on_meta(op, func, args, kwargs, device)
        call = OpCall(func, args, kwargs)
        drawn = None
        if op.is_random and device.type not in ("cpu", "meta"):
            drawn = draw_on_cuda(call, outputs, device, self._generators)
            if drawn is None:
                self._warn(f"{op.name} on {device} is not deferred, how it draws is not known")
                outputs = None
        if outputs is None:
            return self._run_eagerly(op, func, args, kwargs, mutated)
        if device == META:
            return outputs
        # What has no elements needs no memory; lazy modules begin with such tensors.
        if not deferred and not any(leaf.numel() for leaf in tree_leaves(outputs)):
            return self._run(op, func, args, kwargs)
        return self._record(op, call, mutated, outputs, device, drawn)

    def _is_real(self) -> bool:
        return self._eager_scopes is not None and self._eager_scopes.is_running()

    def defer(self, tensor: Tensor) -> DeferredTensor:
        """Return a deferred tensor with the values that ``tensor`` has now."""
        value = _private_copy(tensor)
        meta = Window.of(value)
        like = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=META)
        tape = Tape(like, value.device)
        Write(None, (value,), outputs=(Snapshot(tape, 0, meta),)).enter()
        return DeferredTensor(like, tape, self._mode)

    def _record(
        self,
        op: OpSchema,
        call: OpCall,
        mutated: list[DeferredTensor],
        outputs: Any,
        device: torch.device,
        drawn: PhiloxDraws | None,
    ) -> Any:
        for tensor in mutated:
            self._mode.check_not_exported(tensor)
        # Snapshots come before the results are wrapped: those of an in-place operator are the
        # same tapes, and must be read at the version before this write.
        args, kwargs = tree_map(_freeze, (call.args, {**call.kwargs}))
        snapshots = _deferred_leaves((args, kwargs))
        result, created = self._wrap(call, mutated, outputs, device)
        if not mutated and not any(created):
            return result  # views only
        written = tuple(tensor.deferral.snapshot() for tensor in mutated)
        point: Point | Tensor | None = None if drawn is None else drawn.state
        known: Draws | PhiloxDraws | None = drawn
        if op.is_random and drawn is None:
            window = written[0].window if written else next(filter(None, created)).window
            point, known = draw_on_cpu(call, window, self._generators)
        # An operator that also reads what it writes, such as x.copy_(x), overwrites nothing.
        tapes = [snapshot.tape for snapshot in snapshots]
        is_apart = all(tapes.count(out.tape) == 1 for out in written)
        Write(
            call.func,
            args,
            {**kwargs, "generator": None} if "generator" in kwargs else kwargs,
            outputs=tuple(created) if any(created) else (),
            mutated=written,
            overwrites=op.overwrites and is_apart,
            point=point,
            draws=known,
        ).enter()
        return result

    def _wrap(
        self, call: OpCall, mutated: list[DeferredTensor], outputs: Any, device: torch.device
    ) -> tuple[Any, list[Snapshot | None]]:
        """Return ``outputs`` as deferred tensors, and for each leaf the tape it begins."""
        if any(tensor.deferral.meta.shape != tensor.shape for tensor in mutated):
            raise CannotDefer(f"{schema(call.func).name} resizes a tensor in place")
        # The meta device does the bookkeeping: a result that is an argument's meta tensor is that
        # argument, one on the storage of an argument's is a view of it, any other is new.
        by_meta = {id(tensor.deferral.meta): tensor for tensor in mutated}
        inputs = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if _is_deferred(leaf)]
        by_storage = {t.deferral.tape.key: t.deferral.tape for t in inputs}
        created: list[Snapshot | None] = []

        def wrap(leaf: Any) -> Any:
            created.append(None)
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in by_meta:
                return by_meta[id(leaf)]
            tape = by_storage.get(storage_key(leaf))
            if tape is None:
                tape = by_storage[storage_key(leaf)] = Tape(leaf, device)
                created[-1] = Snapshot(tape, 0, Window.of(leaf))
            return DeferredTensor(leaf, tape, self._mode)

        return tree_map(wrap, outputs), created

    def _run(self, op: OpSchema, func: OpOverload, args: _Args, kwargs: _Kwargs) -> Any:
        """Run an operator on tensors that are real."""
        generator = kwargs.get("generator") or torch.default_generator
        if op.is_random and generator.device.type == "cpu":
            with self._generators.drawing(generator):
                return func(*args, **kwargs)
        if op.is_random:
            self._generators.watch(generator)
        # Not every operator that draws is tagged as random, and one that is not would leave the
        # generator elsewhere than recorded.
        before = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        self._generators.check_untouched(before, op.name)
        return result

    def _run_eagerly(
        self, op: OpSchema, func: OpOverload, args: _Args, kwargs: _Kwargs, mutated: list[Any]
    ) -> Any:
        """Run an operator on the values of its arguments, and record its results."""
        reals: dict[int, Tensor] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, DeferredTensor):
                return leaf
            if id(leaf) not in reals:
                reals[id(leaf)] = values(leaf)
            return reals[id(leaf)]

        real_args, real_kwargs = tree_map(real, (args, kwargs))
        result = self._run(op, func, real_args, real_kwargs)
        by_real: dict[int, Tensor] = {}
        for tensor in mutated:
            if isinstance(tensor, DeferredTensor):
                by_real[id(reals[id(tensor)])] = tensor
                self._set(tensor, reals[id(tensor)])
            else:
                by_real[id(tensor)] = tensor

        def outside(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) in by_real:
                return by_real.get(id(leaf), leaf)
            if can_be_deferred(leaf):
                return self.defer(leaf)
            self._warn(
                f"the result of {op.name} is not deferred, "
                f"{'nested' if leaf.is_nested else leaf.layout} tensors of {leaf.dtype} cannot be"
            )
            return leaf

        return tree_map(outside, result)

    def _warn(self, message: str) -> None:
        warnings.warn(f"{message} ({user_line()})", DeferredWarning, stacklevel=2)

    def _set(self, tensor: DeferredTensor, value: Tensor) -> None:
        """Record that ``tensor`` now has the values of ``value``."""
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise CannotDefer(
                f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} changed in place to "
                f"shape {tuple(value.shape)} and {value.dtype}"
            )
        self._mode.check_not_exported(tensor)
        target = tensor.deferral.snapshot()
        copy = torch.ops.aten.copy_.default
        Write(copy, (target, _private_copy(value)), mutated=(target,)).enter()


def _mutated(op: OpSchema, args: _Args, kwargs: _Kwargs) -> list[Any]:
    """Return the tensors that an operator writes to."""
    arguments = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in op.mutated
    ]
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _change_geometry(op: OpSchema, func: OpOverload, args: _Args, kwargs: _Kwargs) -> Tensor:
    """Make a tensor another view of its storage, in place."""
    tensor = args[0]
    if not isinstance(tensor, DeferredTensor):
        raise CannotDefer(f"{op.name} gives a real tensor the memory of a deferred one")
    if schema(func).overload_name == "source_Tensor":  # set_
        assign_data(tensor, args[1])
        return tensor
    if op.name not in _GEOMETRY_CHANGES:
        raise CannotDefer(f"{op.name} gives a tensor another storage in place")
    deferral = tensor.deferral
    meta = deferral.meta.detach()
    func(meta, *args[1:], **kwargs)
    assign_data(tensor, DeferredTensor(meta, deferral.tape, deferral.mode))
    return tensor


def _scalar(tensor: DeferredTensor) -> Any:
    """Return the value of a tensor of one element."""
    snapshot = tensor.deferral.snapshot()
    known = known_truth(snapshot)
    if known is not None:
        return known
    last = snapshot.tape.entries[snapshot.version - 1].write if snapshot.version else None
    if last is not None and last.func is torch.ops.aten.any.default:
        asked = last.args[0]
        if isinstance(asked, Snapshot) and asked.window.dtype is torch.bool:
            return any_true(asked)
    return replay_part(snapshot).item()


def _is_deferred(leaf: Any) -> bool:
    return isinstance(leaf, DeferredTensor)


def _deferred_leaves(tree: Any) -> list[Snapshot]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Snapshot)]


def _freeze(leaf: Any) -> Any:
    """Return an argument as it is now, whatever is written to it later."""
    if isinstance(leaf, DeferredTensor):
        return leaf.deferral.snapshot()
    return _private_copy(leaf) if isinstance(leaf, Tensor) else leaf


def _private_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; ``clone`` packs tensors with gaps."""
    copy = tensor.detach().clone()
    if copy.stride() == tensor.stride() or not can_be_deferred(tensor) or 0 in tensor.stride():
        return copy
    strided = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return strided.copy_(copy)
