"""Hooks of users that compute what goes on from nothing but what they are given.

A check of rows runs copies of a model on made-up rows. Hooks of users are not run there: they may
write files, or keep what they see. A function whose code can do neither, and that returns
something, or writes to what it is given, is a part of what the model computes, in which rows may
meet.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vescale_parallel._model.code import names_of_code
from vescale_parallel._model.copies import as_registered, is_of_user, pairs
from vescale_parallel._model.random_copies import in_double

# By kind, what marks those that are given keyword arguments, too.
_KINDS = {
    "_forward_pre_hooks": "_forward_pre_hooks_with_kwargs",
    "_forward_hooks": "_forward_hooks_with_kwargs",
    "_backward_pre_hooks": None,
    "_backward_hooks": None,
}
_PLAIN = (bool, int, float, complex, str, type(None))
_ABOUT_TENSORS = (torch.dtype, torch.device, torch.Size)
_MODULES = {
    "torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special",
    "math", "numpy", "einops", "operator",
}  # fmt: skip
_BUILTINS = {
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "getattr", "hasattr", "int",
    "isinstance", "len", "list", "map", "max", "min", "range", "reversed", "round", "set",
    "slice", "sorted", "str", "sum", "super", "tuple", "type", "zip",
}  # fmt: skip
_EFFECTS = {"save", "distributed", "manual_seed", "seed", "tofile"}
_STORES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF"}
# transformers puts it on embeddings whose weights are frozen, for checkpoints.
_NO_WRITES = {"requires_grad_"}


def pure_hooks(model: nn.Module) -> tuple[tuple[int, types.CodeType], ...]:
    """Return the code of such hooks, with the identity of the module that each is on."""
    return tuple((id(module), function.__code__) for module, *_, function in _hooks_of(model))


def is_pure(hook: Any) -> bool:
    """Whether a hook is a function of a user that changes what goes on, and nothing else."""
    function = _function_of(hook)
    if function is None:
        return False
    if function not in _known:
        is_told = is_of_user(function) and _changes_results(function)
        _known[function] = is_told and _is_closed(function)
    return _known[function]


def put_pure_hooks(subject: nn.Module, model: nn.Module) -> None:
    """Put those of a model on a copy whose values are float64, in place."""
    copies = {id(live): copied for copied, live in pairs(subject, model)}
    for module, kind, key, function in _hooks_of(model):
        if (copied := copies.get(id(module))) is not None:
            vars(copied)[kind][key] = _in_double(function)
            mark = _KINDS[kind]
            if mark is not None and key in vars(module)[mark]:
                vars(copied)[mark][key] = True
            copied._is_full_backward_hook = module._is_full_backward_hook


_known = WeakKeyDictionary[types.FunctionType, bool]()


def _hooks_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, int, types.FunctionType]]:
    for module in model.modules():
        held = vars(module)
        for kind in _KINDS:
            if not held[kind]:  # asked in every call of the model
                continue
            for key, hook in held[kind].items():
                function = _function_of(hook)
                if function is not None and is_pure(function):
                    yield module, kind, key, function


def _function_of(hook: Any) -> types.FunctionType | None:
    if isinstance(hook, functools.partial):
        return None if hook.args or hook.keywords else _function_of(hook.func)
    if (registered := as_registered(hook)) is not hook:
        return _function_of(registered)
    return hook if isinstance(hook, types.FunctionType) else None


def _changes_results(function: types.FunctionType) -> bool:
    """Whether a function may return something, or write to what it is given."""
    before: dis.Instruction | None = None
    for each in dis.get_instructions(function):
        if each.opname == "RETURN_CONST" and each.argval is not None:
            return True
        if each.opname == "RETURN_VALUE" and not _is_none(before):
            return True
        if each.opname == "STORE_SUBSCR":
            return True
        if each.opname == "BINARY_OP" and each.argrepr.endswith("="):
            return True
        before = each
    return any(map(_writes, names_of_code(function.__code__)))


def _is_none(instruction: dis.Instruction | None) -> bool:
    if instruction is None or instruction.opname != "LOAD_CONST":
        return False
    return instruction.argval is None


def _writes(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES


def _is_closed(function: types.FunctionType, above: tuple[types.FunctionType, ...] = ()) -> bool:
    """Whether a function can reach nothing that it could change, but for what it is given."""
    code = function.__code__
    names = {*names_of_code(code)}
    inside = {*code.co_varnames, *code.co_cellvars}
    if any(_reaches_out(each, inside) for each in dis.get_instructions(function)):
        return False
    if names & _EFFECTS:
        return False
    try:
        held = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one that is not filled yet
        return False
    held += function.__defaults__ or ()
    held += (function.__kwdefaults__ or {}).values()
    reached = {name: function.__globals__[name] for name in names if name in function.__globals__}
    values = [*held, *reached.values()]
    if any(isinstance(each, Tensor) for each in values) and any(map(_writes, names)):
        return False
    of_python = (names & vars(builtins).keys()) - reached.keys()
    above = (*above, function)
    return of_python <= _BUILTINS and all(_is_harmless(each, above) for each in values)


def _reaches_out(instruction: dis.Instruction, inside: Collection[str]) -> bool:
    is_stored = instruction.opname in _STORES and instruction.argval not in inside
    return is_stored or instruction.opname == "IMPORT_NAME"


def _is_harmless(value: Any, above: tuple[types.FunctionType, ...]) -> bool:
    if isinstance(value, type):  # backward of a function of its own may do anything
        return not issubclass(value, torch.autograd.Function)
    if isinstance(value, types.ModuleType):
        return value.__name__ in _MODULES
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        if (value.__module__ or "torch").partition(".")[0] in _MODULES:
            return True
        return value in above or (
            isinstance(value, types.FunctionType) and _is_closed(value, above)
        )
    return isinstance(value, (*_PLAIN, *_ABOUT_TENSORS)) or type(value) in (Tensor, nn.Parameter)


def _in_double(function: types.FunctionType) -> Callable[..., Any]:
    """Return a function that holds tensors in the dtype of its kind that rounds least."""
    cells = tuple(
        types.CellType(in_double(cell.cell_contents))
        if isinstance(cell.cell_contents, Tensor)
        else cell
        for cell in function.__closure__ or ()
    )
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
