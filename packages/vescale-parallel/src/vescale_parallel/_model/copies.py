"""Copies of modules that are made to be run once, apart from the model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_parallel._torch_private import pytree

# transformers', that keep outputs of modules for the model's own forward.
_COLLECTS = "transformers.utils.output_capturing"
_NOT_OF_USERS = ("torch.", "vescale.", "vescale_")
# Where torch keeps hooks, and which of them are called otherwise.
_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
_REGISTERED = ("_parameters", "_buffers", "_modules")
_FLAGS = (bool, int, float, str, type(None))


def copied_without_hooks(
    module: nn.Module,
    make_parameter: Callable[[nn.Parameter], nn.Parameter],
    make_buffer: Callable[[Tensor], Tensor],
) -> nn.Module:
    """Copy a module with other parameters and buffers, and without its users' hooks.

    ``make_parameter`` is asked once for tied ones; ``make_buffer`` also for a tensor that is kept
    as an attribute.

    Neither the tensors nor what hooks refer to is copied. Hooks that forward needs stay: those of
    torch that compute weights, as of torch.nn.utils.weight_norm, those of
    :func:`collects_outputs`, and the model's own.
    """
    memo: dict[int, Any] = {id(p): make_parameter(p) for p in module.parameters()}
    for each in module.modules():
        for tensor in tensors_of(each):
            if id(tensor) not in memo:
                memo[id(tensor)] = make_buffer(tensor)
    return copied_with_hooks(module, memo, _is_of_forward)


def copied_with_hooks(
    module: nn.Module, memo: dict[int, Any], keeps: Callable[[Any], bool] = lambda hook: True
) -> nn.Module:
    """Copy a module by ``memo``, with its own hooks on the copy and some others, which it shares.

    A module that registers a method of its own as a hook, to read in forward what a layer within
    it returned, needs it to put that into the copy.
    """
    for hooks in _hooks_of(module):
        memo[id(hooks)] = OrderedDict[int, Any]()
    copied = deep_copied(module, memo)
    within = {id(each) for each in module.modules()}
    for hooks in _hooks_of(module):
        for key, hook in hooks.items():
            if is_of_module(hook, within):
                memo[id(hooks)][key] = _on_copies(hook, memo)
            elif keeps(hook):
                memo[id(hooks)][key] = hook
    return copied


def give_own_hooks(copied: nn.Module, model: nn.Module) -> None:
    """Put hooks on a copy that modules of a model have added since it was made, in place."""
    of_copy: dict[int, Any] = {id(live): each for each, live in pairs(copied, model)}
    for each, live in pairs(copied, model):
        for name, marks in _HOOKS.items():
            for key, hook in vars(live)[name].items():
                if key not in vars(each)[name] and is_of_module(hook, of_copy):
                    vars(each)[name][key] = _on_copies(hook, of_copy)
                    for mark in marks:
                        if key in vars(live)[mark]:
                            vars(each)[mark][key] = True


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and dtype that has no memory."""
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape and dtype that has no memory."""
    return nn.Parameter(on_meta(parameter), parameter.requires_grad)


def copied_without_values(model: nn.Module) -> nn.Module | None:
    """Copy a model without memory for its parameters; None if it cannot be copied."""
    try:
        return copied_without_hooks(model, meta_parameter, lambda buffer: buffer)
    # Arbitrary attributes of a user's modules: locks, files, process groups.
    except Exception:
        return None


def plain(tensor: Tensor) -> Tensor:
    """Return an argument of a call for a copy of its model: plain, zeros if it is distributed."""
    if isinstance(tensor, DTensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach()


def pairs(copied: nn.Module, model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield modules of a copy with those of the model that have their names.

    Of some there is none: BigBird's forward replaces its attention where sequences are short.
    """
    live = dict(model.named_modules())
    return ((each, live[fqn]) for fqn, each in copied.named_modules() if fqn in live)


def discard(copied: nn.Module) -> None:
    """Let go of what a copy holds, which nobody uses again.

    Hooks and bound functions refer to the modules that they are on, so that without this the
    tensors of a copy, and what its last call kept, would wait for the garbage collector.
    """
    for each in list(copied.modules()):
        vars(each).clear()


def drop_hooks(module: nn.Module) -> None:
    """Remove the hooks of users from a copy, and from the modules in it."""
    within = {id(each) for each in module.modules()}
    for hooks in _hooks_of(module):
        for key, hook in list(hooks.items()):
            if not (_is_of_forward(hook) or is_of_module(hook, within)):
                del hooks[key]


def hooks_of_users(module: nn.Module) -> list[Any]:
    """Return the hooks of one module that its forward would do without."""
    held = [hook for name in _HOOKS for hook in vars(module).get(name, {}).values()]
    return [hook for hook in held if not _is_of_forward(hook)]


def is_of_user(hook: Any) -> bool:
    """Whether a hook is neither torch's nor this project's, nor one that forward needs."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return not (f"{where}.".startswith(_NOT_OF_USERS) or _is_of_forward(hook))


def collects_outputs(hook: object) -> bool:
    """Whether a hook keeps what modules return for the model's own forward, and reads none of it.

    transformers adds them in the first call that asks for hidden states, as LLaVA's forward asks
    its vision tower, and notes that it did in an attribute.
    """
    return getattr(hook, "__module__", None) == _COLLECTS


def _hooks_of(module: nn.Module) -> Iterator[MutableMapping[int, Any]]:
    held = (vars(each).get(name) for each in module.modules() for name in _HOOKS)
    return (hooks for hooks in held if hooks is not None)


def _is_of_forward(hook: object) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.") or collects_outputs(hook)


def as_registered(hook: Any) -> Any:
    """Return a hook as its user has registered it, of one that tensor parallelism runs."""
    return getattr(hook, "_vescale_hook", hook)


def is_of_module(hook: Any, within: Container[int]) -> bool:
    """Whether a hook is a method of some module, or a function that is made in one."""
    hook = as_registered(hook)
    if isinstance(hook, functools.partial):
        return is_of_module(hook.func, within)
    if isinstance(hook, types.MethodType):
        return id(hook.__self__) in within
    held = [cell.cell_contents for cell in _cells(hook) if _is_filled(cell)]
    return any(id(each) in within and _is_made_by(hook, type(each)) for each in held)


def _is_made_by(function: Any, cls: type) -> bool:
    return any(
        function.__module__ == base.__module__
        and function.__qualname__.startswith(f"{base.__qualname__}.")
        for base in cls.__mro__
    )


def _on_copies(hook: Any, memo: dict[int, Any]) -> Any:
    """Return a hook of a module as the hook of its copy."""
    hook = as_registered(hook)
    if isinstance(hook, functools.partial):
        args = (memo.get(id(each), each) for each in hook.args)
        by_name = {name: memo.get(id(each), each) for name, each in hook.keywords.items()}
        return functools.partial(_on_copies(hook.func, memo), *args, **by_name)
    if isinstance(hook, types.MethodType):
        return types.MethodType(hook.__func__, memo[id(hook.__self__)])
    return _rebound(hook, memo)


def tensors_in_attributes(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield tensors that modules hold in plain attributes: module FQN, attribute and tensor."""
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if (
                _may_hold_tensors(value)
                and name not in _REGISTERED
                and not name.endswith("_hooks")
            ):
                leaves = pytree.tree_leaves(value)
                yield from ((fqn, name, leaf) for leaf in leaves if isinstance(leaf, Tensor))


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of one module, and tensors that are plain attributes."""
    for value in vars(module).values():
        if _may_hold_tensors(value):
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _may_hold_tensors(value: object) -> bool:
    # Most attributes are flags, and dicts of hooks that nobody has added.
    return not isinstance(value, _FLAGS) and not (isinstance(value, dict) and not value)


def deep_copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module as copy.deepcopy does, its functions included.

    copy.deepcopy shares functions. One that is kept on a module and reads it from its closure, as
    ``self.head = lambda x: x @ self.embed.weight.T`` does, would go on reading the original. And
    it refuses tensors with a graph, such as weights that torch.nn.utils.weight_norm computes of
    parameters before each call: of these, copies have the values alone.
    """
    memo = {} if memo is None else memo
    for _, _, tensor in tensors_in_attributes(module):
        if type(tensor) is Tensor and tensor.grad_fn is not None and id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
    within = {id(each) for each in module.modules()}
    copied: nn.Module = copy.deepcopy(module, memo)
    for each in copied.modules():
        for name, value in list(vars(each).items()):
            if isinstance(value, types.FunctionType):
                vars(each)[name] = _rebound(value, memo)
            elif name in _HOOKS and value:
                for key, hook in value.items():
                    if _is_function(hook) and is_of_module(hook, within):
                        value[key] = _rebound(hook, memo)
            elif isinstance(value, list | tuple) and any(map(_is_function, value)):
                values = [_rebound(v, memo) if _is_function(v) else v for v in value]
                vars(each)[name] = type(value)(values)
    return copied


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType)


def _rebound(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function whose closure and defaults have the copies of what was copied."""
    closure = _cells(function)
    defaults = cast("tuple[Any, ...]", function.__defaults__ or ())
    by_name = cast("dict[str, Any]", function.__kwdefaults__ or {})
    held = [cell.cell_contents for cell in closure if _is_filled(cell)]
    held += [*defaults, *by_name.values()]
    # What is kept nowhere else, a list of layers for example, is copied with what it holds.
    copies = {id(each): copy.deepcopy(each, memo) for each in held if _holds_copied(each, memo)}
    if not copies:
        return function
    cells = [
        types.CellType(copies.get(id(cell.cell_contents), cell.cell_contents))
        if _is_filled(cell)
        else cell
        for cell in closure
    ]
    bound = types.FunctionType(
        function.__code__, function.__globals__, function.__name__,
        tuple(copies.get(id(each), each) for each in defaults), tuple(cells),
    )  # fmt: skip
    bound.__kwdefaults__ = {name: copies.get(id(each), each) for name, each in by_name.items()}
    vars(bound).update(vars(function))
    return bound


def _holds_copied(value: Any, memo: Mapping[int, Any]) -> bool:
    if isinstance(value, types.MethodType):  # a forward that another one is put around
        value = value.__self__
    parts = [value, *value.modules()] if isinstance(value, nn.Module) else [value]
    if isinstance(value, list | tuple | dict):
        parts += pytree.tree_leaves(value)
    return any(id(each) in memo for each in parts)


def _cells(function: Any) -> tuple[types.CellType, ...]:
    return getattr(function, "__closure__", None) or ()


def _is_filled(cell: types.CellType) -> bool:
    try:
        return (cell.cell_contents, True)[1]
    except ValueError:
        return False


def writable(leaf: Tensor) -> Tensor:
    """Return a tensor's own memory for code that writes in place, as ``nn.ReLU(inplace=True)``.

    Autograd lets no one write to a leaf that needs a gradient, nor to a view of one. The result
    needs a gradient as the leaf does, under ``no_grad`` too.
    """
    if not leaf.requires_grad:
        return leaf
    with torch.enable_grad():
        return torch.ops.aten._unsafe_view(leaf, leaf.shape)


def own_containers(tree: Any) -> Any:
    """Return a tree of the same leaves, in lists and dicts that a forward may put more into."""
    return pytree.tree_map(lambda leaf: leaf, tree)


def snapshot(tree: Any) -> Any:
    """Copy the containers of a tree, and objects that a module might change: caches."""
    return pytree.tree_map(_copied_leaf, tree)


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor | nn.Module | type) or not hasattr(leaf, "__dict__"):
        return leaf
    return copied_object(leaf)


def copied_object(thing: Any) -> Any:
    """Return a deep copy that shares tensors and modules; the thing itself if it has none.

    A module that an argument holds, or is a method of, knows the whole model once it is
    parallelized, and copying that is an operation of all ranks.
    """
    memo = {id(held): held for held in _held_within(thing, (Tensor, nn.Module), bound=True)}
    try:
        return copy.deepcopy(thing, memo)
    # Arbitrary user objects.
    except Exception:
        return thing


def tensors_within(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors that an object holds, at any depth."""
    return _held_within(thing, (Tensor,))


def _held_within(thing: Any, kinds: tuple[type, ...], *, bound: bool = False) -> Iterator[Any]:
    """Yield what an object holds of some types; ``bound``: also what a method is bound to."""
    todo, seen = [thing], set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kinds):
            yield each
        elif isinstance(each, Mapping):
            todo += each.values()
        elif isinstance(each, list | tuple | set):
            todo += each
        elif isinstance(each, type):
            continue
        elif bound and isinstance(each, types.MethodType):
            todo.append(each.__self__)
        elif bound and isinstance(each, functools.partial):
            todo += [each.func, each.args, each.keywords]
        elif dataclasses.is_dataclass(each):  # which may have slots
            todo += [getattr(each, field.name, None) for field in dataclasses.fields(each)]
        elif hasattr(each, "__dict__"):
            todo += vars(each).values()
