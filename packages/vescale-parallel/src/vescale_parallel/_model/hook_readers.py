"""Which parameters hooks of users read.

Hooks are not run in a check: they may write files, or keep what they see. What their code names
among the parameters of modules that it can reach is taken as read, and so stays whole.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn

from .copies import hooks_of_users

# Names that stand for all parameters of a module.
_ALL = frozenset(("parameters", "named_parameters", "state_dict", "_parameters"))
_DEPTH = 4


def read_by_hooks(model: nn.Module) -> dict[str, str]:
    """Return the parameters that hooks of users may read, and why that is thought."""
    found: dict[str, str] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    inside = {id(module): fqn for fqn, module in model.named_modules()}
    for fqn, module in model.named_modules():
        for hook in hooks_of_users(module):
            names, objects = mentions(hook, _DEPTH)
            for owner in (module, *objects):
                for name in _read(owner, names, named, inside):
                    found.setdefault(name, f"a hook of {fqn or 'the model'!r} may read it")
    return found


def modules_in_closures(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that functions kept on a module hold, and that are no submodules of it.

    With the name of the attribute that has the function. Those without parameters are left out.
    """
    inside = {id(each) for each in module.modules()}
    for fqn, each in module.named_modules():
        for name, value in vars(each).items():
            if not isinstance(value, types.FunctionType | types.MethodType | functools.partial):
                continue
            for held in mentions(value, _DEPTH)[1]:
                if isinstance(held, nn.Module) and id(held) not in inside and [*held.parameters()]:
                    yield f"{fqn}.{name}" if fqn else name, held


def _read(
    owner: object, names: set[str], named: Mapping[str, nn.Parameter], inside: Mapping[int, str]
) -> Iterator[str]:
    if isinstance(owner, Tensor):
        yield from (name for name, parameter in named.items() if parameter is owner)
    elif isinstance(owner, nn.Module) and id(owner) in inside:
        prefix = f"{inside[id(owner)]}." if inside[id(owner)] else ""
        for name in named:
            last = name.rpartition(".")[2]
            if name.startswith(prefix) and (last in names or names & _ALL):
                yield name


def mentions(function: Any, depth: int) -> tuple[set[str], list[object]]:
    """Return the names in a function's code, and the objects that it holds."""
    if isinstance(function, functools.partial):
        partial = cast("functools.partial[Any]", function)
        names, objects = mentions(partial.func, depth)
        return names, [*objects, *partial.args, *partial.keywords.values()]
    if isinstance(function, types.MethodType):
        names, objects = mentions(function.__func__, depth)
        return names, [*objects, function.__self__]
    if not isinstance(function, types.FunctionType):
        call = inspect.getattr_static(type(function), "__call__", None)
        held = list(getattr(function, "__dict__", {}).values())
        if not isinstance(call, types.FunctionType) or depth == 0:
            return set(), held
        names, objects = mentions(call, depth - 1)
        return names, [*objects, function, *held]
    names = set(_names(function.__code__))
    objects: list[object] = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        objects += _contents(cell)
    objects += [function.__globals__[name] for name in names if name in function.__globals__]
    for inner in [each for each in objects if isinstance(each, types.FunctionType)]:
        if depth:
            more, held = mentions(inner, depth - 1)
            names, objects = names | more, [*objects, *held]
    return names, objects


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant  # of getattr


def _contents(cell: types.CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []
