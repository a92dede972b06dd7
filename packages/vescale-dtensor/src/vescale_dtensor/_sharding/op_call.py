"""One call of an operator, as the rules see it: arguments by name, tensors by layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._layout.layout import Layout, layout, layout_of_spec, replicated
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload, pytree


class Unsupported(NotImplementedError):
    """No device could say what this operator does to a distributed tensor."""


class OpCall:
    """An operator and its arguments.

    Attributes:
        func: The operator.
        args: Positional arguments, tensors included.
        kwargs: Keyword arguments.
        mesh: The mesh of the first distributed tensor.
        tensors: All tensors among the arguments, in order, nested lists included.
        layouts: Theirs. A plain tensor counts as whole on every rank.
    """

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._leaves = leaves
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[i] for i in self.places]
        sharded = [t for t in self.tensors if isinstance(t, DISTRIBUTED)]
        self.mesh: DeviceMesh = layout_of_spec(sharded[0]._spec).mesh
        self.meshes = {layout_of_spec(t._spec).mesh for t in sharded}
        self.layouts = [layout_on(t, self.mesh) for t in self.tensors]

    def release(self) -> None:
        """Let go of the tensors, but not of what is known of them: a plan outlives its call."""
        self.tensors = [_meta(made) for made in self.layouts]
        self.args, self.kwargs = self.with_tensors(self.tensors)
        self._leaves = pytree.tree_leaves((self.args, self.kwargs))

    def named(self, name: str, default: Any = None) -> Any:
        """Return the argument of the schema's ``name``, or its default."""
        position, schema_default = argument_table(self.func).get(name, (None, default))
        if name in self.kwargs:
            return self.kwargs[name]
        if position is not None and position < len(self.args):
            return self.args[position]
        return schema_default

    def tensor_index(self, name: str) -> int | None:
        """Return the index into :attr:`tensors` of the tensor argument ``name``."""
        found = self.named(name)
        return next((i for i, t in enumerate(self.tensors) if t is found), None)

    def with_tensors(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in their places."""
        leaves = list(self._leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._structure)

    @cached_property
    def written(self) -> frozenset[int]:
        """Indices of the tensors that the operator writes into."""
        trees = [self.named(name) for name in written_names(self.func)]
        ids = {id(leaf) for tree in trees for leaf in pytree.tree_leaves(tree)}
        return frozenset(i for i, tensor in enumerate(self.tensors) if id(tensor) in ids)

    @cached_property
    def result(self) -> Any:
        """What the operator returns, as tensors without data.

        Raises:
            NotImplementedError: If torch cannot tell without data.
        """
        args, kwargs = self.with_tensors([_meta(made) for made in self.layouts])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            return self.func(*args, **kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            # Whether the call is wrong or its shape function, the operator itself will tell.
            raise NotImplementedError(f"{self.func} without data: {error}") from error

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The tensors of :attr:`result`, in order."""
        return [leaf for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, Tensor)]


def _meta(made: Layout) -> Tensor:
    """Return a tensor without data, as on one device."""
    return torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")


def layout_on(tensor: Tensor, mesh: DeviceMesh) -> Layout:
    """Return the layout of a tensor; a plain one is whole on every rank of ``mesh``."""
    if isinstance(tensor, DISTRIBUTED):
        return layout_of_spec(tensor._spec)
    return layout(mesh, replicated(mesh), tensor.shape, tensor.stride(), tensor.dtype)


@cache
def argument_table(func: OpOverload) -> dict[str, tuple[int | None, Any]]:
    """Return the position (None if keyword only) and default of every argument."""
    return {
        argument.name: (None if argument.kwarg_only else index, argument.default_value)
        for index, argument in enumerate(func._schema.arguments)
    }


@cache
def written_names(func: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes into."""
    return tuple(
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_values(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that a call writes into."""
    return pytree.tree_leaves([given(func, name, args, kwargs) for name in written_names(func)])


def given(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument of a name, None if it was not given."""
    position = argument_table(func)[name][0]
    if position is not None and position < len(args):
        return args[position]
    return kwargs.get(name)


def variant(func: OpOverload, suffix: str) -> OpOverload | None:
    """Return the operator whose name has a suffix more, ``_`` or ``_copy``, if there is one."""
    packet = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::") + suffix, None)
    return getattr(packet, func._overloadname, None)


@cache
def is_inplace(func: OpOverload) -> bool:
    """Whether the operator writes into its first argument."""
    return func._schema.arguments[0].name in written_names(func)


@cache
def is_view(func: OpOverload) -> bool:
    """Whether results alias arguments that are not written."""
    # Its schema does not say so, but it does; out= of torch.kron is written through it.
    if func is torch.ops.aten._unsafe_view.default:
        return True
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )


@dataclass(frozen=True, slots=True)
class RankView:
    """What a rank's own call may depend on.

    Attributes:
        coordinate: The rank's place on the mesh.
        inputs: Layouts of the tensors, as the operator gets them.
        outputs: Layouts of the tensors it returns.
    """

    coordinate: tuple[int, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


Function = Callable[..., Any]


def with_arguments(
    call: OpCall, values: dict[str, Any], function: Function | None = None
) -> Function:
    """Return the operator with some arguments fixed, taking all arguments of ``call``."""
    table = argument_table(call.func)
    run = function or call.func
    positions = {}
    names = {}
    for name, value in values.items():
        position = table[name][0]
        if position is not None and position < len(call.args):
            positions[position] = value
        else:
            names[name] = value

    def fixed(*args: Any, **kwargs: Any) -> Any:
        changed = list(args)
        for position, value in positions.items():
            changed[position] = value
        return run(*changed, **{**kwargs, **names})

    return fixed
