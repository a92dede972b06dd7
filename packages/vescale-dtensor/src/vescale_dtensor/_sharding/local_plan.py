"""What a call does: move some inputs, run on local tensors, say where the results are.

A plan is made once for a combination of operator, layouts and non-tensor arguments, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._comm.emulation import coordinate_of, is_emulated, per_rank
from vescale_dtensor._layout.layout import Layout, layout, layout_of_spec, replicated
from vescale_dtensor._tensor.dtensor import DTensor, as_dtensor, redistributed, wrap
from vescale_dtensor._tensor.pending_sums import moved
from vescale_dtensor._tensor.strides import as_laid_out, lies_as
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload, pytree

from .op_call import Function, OpCall, RankView, given, layout_on, with_arguments, written_names
from .signature import OpSpec, Signature

# Takes the arguments of a call, DTensors included, and returns its result.
Plan = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class LocalCall:
    """A call on local tensors: nothing moves, they take the places of distributed ones.

    Attributes:
        function: Takes the call's arguments with local tensors.
        finish: Makes the result of the call from its arguments and the local result.
        layout: Of the result, if it is one tensor and not one of the arguments.
    """

    __slots__ = ("finish", "function", "layout")

    def __init__(
        self,
        function: Function,
        finish: Callable[[tuple[Any, ...], dict[str, Any], Any], Any],
        layout: Layout | None,
    ) -> None:
        self.function = function
        self.finish = finish
        self.layout = layout

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local_args, local_kwargs = pytree.tree_map(_local_of, (args, kwargs))
        return self.finish(args, kwargs, self.function(*local_args, **local_kwargs))


def plan_of_spec(call: OpCall, signature: Signature, op_spec: OpSpec) -> Plan:
    """Return the plan that moves inputs to where ``op_spec`` has them."""
    inputs, outputs = op_spec.inputs, op_spec.outputs
    function = own_function(call, signature.arguments, signature.function, inputs, outputs)
    if call.func.name().startswith(_OTHER_ORDER):
        function = _in_memory_order(function, op_spec.outputs)
    finish = finisher(call.func, call.mesh, op_spec.outputs)
    unmoved = all(a is b for a, b in zip(call.layouts, op_spec.inputs, strict=True))
    if unmoved and takes_locals(call):
        return LocalCall(function, finish, _only(call.func, op_spec.outputs))
    move = _mover(call, op_spec.inputs)

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local_args, local_kwargs = move(args, kwargs)
        return finish(args, kwargs, function(*local_args, **local_kwargs))

    return run


# Operators of which torch's meta kernels give other strides than those that compute.
_OTHER_ORDER = ("aten::linalg_", "aten::_linalg_", "aten::_fft_")


def _in_memory_order(function: Function, outputs: tuple[Layout, ...]) -> Function:
    """Return ``function`` with its results in memory as their layouts say."""

    def ordered(_: tuple[int, ...], local: Tensor, made: Layout) -> Tensor:
        if local.ndim != len(made.stride):
            return local
        order = sorted(range(local.ndim), key=lambda dim: -made.stride[dim])
        permuted = local.permute(order)
        if permuted.is_contiguous():
            return local
        return permuted.contiguous().permute(sorted(range(local.ndim), key=order.__getitem__))

    def run(*args: Any, **kwargs: Any) -> Any:
        rest = iter(outputs)
        result = function(*args, **kwargs)

        def reorder(local: Tensor) -> Tensor:
            made = next(rest)
            return per_rank(ordered, made.mesh, local, made)

        return pytree.tree_map_only(Tensor, reorder, result)

    return run


def is_in_order(result: Any) -> bool:
    """Whether the local tensors of results have their dims in memory as their layouts say."""
    leaves = pytree.tree_leaves(result)
    return all(
        lies_as(leaf._local_tensor, layout_of_spec(leaf._spec).stride)
        for leaf in leaves
        if type(leaf) is DTensor
    )


def in_order(plan: Plan) -> Plan:
    """Return ``plan`` with results that say which strides they have.

    torch's kernels do not always give the strides that its meta kernels promise.
    """
    return lambda func, args, kwargs: told(plan(func, args, kwargs))


def told(result: Any) -> Any:
    """Return results with the strides that their local tensors have."""

    def tell(tensor: DTensor) -> DTensor:
        return wrap(*as_laid_out(tensor._local_tensor, layout_of_spec(tensor._spec)))

    return pytree.tree_map_only(DTensor, tell, result)


def plan_again(call: OpCall, result: Any) -> Plan | None:
    """Return the plan of a call on whole tensors whose ``result`` is known; None if it varies."""
    if _VARYING & set(call.func.tags) or not takes_locals(call):
        return None
    leaves = pytree.tree_leaves(result)
    outputs = tuple(layout_on(leaf, call.mesh) for leaf in leaves if isinstance(leaf, Tensor))
    finish = finisher(call.func, call.mesh, outputs)
    return LocalCall(call.func, finish, _only(call.func, outputs))


_VARYING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def takes_locals(call: OpCall) -> bool:
    """Whether the operator can be given local tensors, and plain ones as they are.

    A plain tensor that is written is one tensor for all emulated ranks, so it cannot.
    """
    return all(
        type(tensor) is DTensor
        or (not isinstance(tensor, DISTRIBUTED) and not (index in call.written and is_emulated()))
        for index, tensor in enumerate(call.tensors)
    )


def _mover(
    call: OpCall, inputs: tuple[Layout, ...]
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """Return what makes a call's local arguments, moving tensors to where they are needed."""
    found = [next((i for i, a in enumerate(call.args) if a is t), None) for t in call.tensors]
    positions = [position for position in found if position is not None]
    if len(set(positions)) < len(found):

        def move_nested(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            again = OpCall(call.func, args, kwargs)
            pairs = zip(again.tensors, inputs, strict=True)
            return again.with_tensors([local_under(t, target) for t, target in pairs])

        return move_nested
    targets = list(zip(positions, inputs, strict=True))

    def move(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local_args = list(args)
        for position, target in targets:
            local_args[position] = local_under(args[position], target)
        return local_args, kwargs

    return move


def local_under(tensor: Tensor, target: Layout) -> Tensor:
    """Return the local part of ``tensor`` where ``target`` wants it."""
    if isinstance(tensor, DISTRIBUTED):
        if tensor._spec is target.spec:
            return tensor._local_tensor
        return moved(as_dtensor(tensor), target)._local_tensor
    if target.is_replicated and not is_emulated():
        return tensor
    return redistributed(plain_local(tensor, target.mesh), target.placements)._local_tensor


def distributed(tensor: Tensor, call: OpCall) -> DTensor:
    """Return ``tensor``, or a plain one as if it was whole on every rank."""
    if isinstance(tensor, DISTRIBUTED):
        return as_dtensor(tensor)
    return plain_local(tensor, call.mesh)


def plain_local(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a plain tensor as one that is whole on every rank of ``mesh``."""
    # What moves elements would move them without the bits of conj().
    local = tensor.detach().resolve_conj().resolve_neg()
    return wrap(per_rank(lambda _, each: each, mesh, local), layout_on(tensor, mesh))


def finisher(
    func: OpOverload, mesh: DeviceMesh, outputs: Sequence[Layout] | None = None
) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Any]:
    """Return what makes a call's result from its arguments and its local result.

    ``outputs`` are the layouts of all tensors in the result, None if they are whole on every rank.
    """
    names = returned_names(func)
    if not names and func._schema.is_mutable:
        return lambda args, kwargs, result: count_writes(func, args, kwargs)
    if not names:
        return lambda args, kwargs, result: result
    if len(names) == 1 and names[0] is not None:
        name = names[0]
        return lambda args, kwargs, result: given(func, name, args, kwargs)

    def finish(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        rest = iter(outputs) if outputs is not None else None

        def wrap_next(local: Tensor) -> DTensor:
            if rest is None:
                return whole(local, mesh)
            # The dtype is what the kernel chose: that of statistics may be another one.
            return wrap(local, next(rest).typed(local.dtype))

        if isinstance(result, Tensor):
            return wrap_next(result)
        if type(result) is tuple and not any(names):
            return tuple(wrap_next(x) if isinstance(x, Tensor) else x for x in result)
        wrapped = pytree.tree_map_only(Tensor, wrap_next, result)
        if not any(names):
            return wrapped
        return tuple(
            value if name is None else given(func, name, args, kwargs)
            for name, value in zip(names, wrapped, strict=True)
        )

    return finish


def count_writes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count, as ``tensor._version``, what an operator wrote into lists of tensors.

    torch counts writes to one tensor itself, and leaves those to lists to the kernel, which sees
    local tensors only.
    """
    for name in written_names(func):
        value = given(func, name, args, kwargs)
        if isinstance(value, list | tuple) and not torch.compiler.is_compiling():
            increment_version([each for each in value if not torch.is_inference(each)])


def whole(local: Tensor, mesh: DeviceMesh, *, offset: int = 0) -> DTensor:
    """Wrap a local tensor that every rank has."""
    made = layout(mesh, replicated(mesh), local.shape, local.stride(), local.dtype)
    return wrap(local, made, offset=offset)


@cache
def returned_names(func: OpOverload) -> tuple[str | None, ...]:
    """Return for every result the written argument that it is, None for a new one."""
    written = {
        next(iter(argument.alias_info.before_set), None): argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return tuple(
        written[next(iter(r.alias_info.before_set))]
        if r.alias_info is not None and r.alias_info.is_write
        else None
        for r in func._schema.returns
    )


def local_function(mesh: DeviceMesh, at: Callable[[tuple[int, ...]], Function]) -> Function:
    """Return ``at(coordinate)`` of this rank; under emulation, one that runs every rank's."""
    if not is_emulated():
        return at(coordinate_of(mesh))
    functions: dict[tuple[int, ...], Function] = {}

    def run(coordinate: tuple[int, ...], args: Any, kwargs: Any) -> Any:
        if coordinate not in functions:
            functions[coordinate] = at(coordinate)
        return functions[coordinate](*args, **kwargs)

    return lambda *args, **kwargs: per_rank(run, mesh, args, kwargs)


def own_function(
    call: OpCall,
    arguments: Callable[[RankView], dict[str, Any]] | None,
    function: Callable[[RankView], Function] | None,
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout, ...],
) -> Function:
    """Return a rank's own call, as a signature or a view describes it."""
    if arguments is None and function is None:
        return call.func

    def at(coordinate: tuple[int, ...]) -> Function:
        local = RankView(coordinate, inputs, outputs)
        run = function(local) if function else call.func
        return run if arguments is None else with_arguments(call, arguments(local), run)

    return local_function(call.mesh, at)


def _only(func: OpOverload, outputs: tuple[Layout, ...]) -> Layout | None:
    """Return the layout of a call's result if that is a new tensor."""
    returns = func._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor" and not func._schema.is_mutable:
        return outputs[0]
    return None


def _local_of(leaf: Any) -> Any:
    return leaf._local_tensor if isinstance(leaf, DTensor) else leaf
