"""What a call of a module leaves behind, which two calls in the place of one would leave twice."""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_parallel._model.copies import tensors_in_attributes
from vescale_parallel._model.names_of_code import names_of_code
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import generator_state

_CONTAINERS = (list, dict, set, deque)


def what_stays(module: nn.Module, given: tuple[Tensor, ...]) -> str:
    """Return what a call of a module in training leaves behind; empty if that is nothing.

    What a call assigns to attributes may stay, if the next one of the same inputs does so alike.
    """
    drawn, written, made = generator_state(), [*module.buffers()], _Results()
    before = [buffer.clone() for buffer in written]
    module.train()
    with torch.no_grad():
        module(*given)
        state, outside = _kept(module), numbers_outside(module)  # what is made once, is by now
        with made:
            module(*given)
        same = _same(state, _kept(module))
        module(*given)
    module.eval()
    if generator_state() != drawn:
        return "its forward draws random numbers; set its dropout to 0"
    if not same or not all(map(torch.equal, before, written)):
        return (
            "its forward writes to its buffers, or keeps something from call to call; what counts "
            "tokens of experts can be left to vescale_parallel.expert_load"
        )
    if made.num_alive():
        return "its forward hands tensors to a list or an object outside of it, in each call"
    if outside != numbers_outside(module):
        return "its forward adds to a list or to numbers outside of it, in each call"
    return ""


class _Results(TorchFunctionMode):
    """Notes the tensors that are made while code runs, and which are still there later."""

    def __init__(self) -> None:
        super().__init__()
        self._made = list[weakref.ref[Tensor]]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in given:  # as x.contiguous() may be
                self._made.append(weakref.ref(leaf))
        return result

    def num_alive(self) -> int:
        """Return how many there are, of those that no graph of autograd and no cycle holds."""
        gc.collect()
        return sum(each() is not None for each in self._made)


def _kept(module: nn.Module) -> list[Any]:
    """Return what a module keeps from call to call: tensors, numbers, and lengths of lists."""
    kept = [*module.buffers(), *(tensor for *_, tensor in tensors_in_attributes(module))]
    values = [value for each in module.modules() for value in vars(each).values()]
    numbers = [value for value in values if isinstance(value, int | float)]
    lists = [len(value) for value in values if isinstance(value, list | dict)]
    return [*(tensor.detach().clone() for tensor in kept), [*numbers, *lists]]


def _same(before: list[Any], after: list[Any]) -> bool:
    *tensors, numbers = before
    *tensors_after, numbers_after = after
    if numbers != numbers_after or len(tensors) != len(tensors_after):
        return False
    return all(map(torch.equal, tensors, tensors_after))


def numbers_outside(module: nn.Module) -> list[Any]:
    """Return numbers, and lengths of containers, that code of modules refers to by name.

    Those are in globals and closures of its methods, and of functions that are written beside
    them, in its classes, and in objects that are attributes.
    """
    found = list[Any]()
    for each in module.modules():
        for value in vars(each).values():
            found += _numbers_of(value, deep=False)
        for kind in type(each).__mro__:
            if kind.__module__.partition(".")[0] != "torch" and kind is not object:
                found += [x for value in vars(kind).values() for x in _numbers_in(value)]
                methods = (x for x in vars(kind).values() if isinstance(x, types.FunctionType))
                seen = set[int]()
                for method in methods:
                    found += [
                        x
                        for value in _named_by(method, seen)
                        for x in _numbers_of(value, deep=True)
                    ]
    return found


def _named_by(function: types.FunctionType, seen: set[int]) -> Iterator[Any]:
    """Yield what a function refers to, and what functions of the same file do that it calls."""
    if id(function.__code__) in seen:
        return
    seen.add(id(function.__code__))
    cells = (cell for cell in function.__closure__ or () if _is_filled(cell))
    yield from (cell.cell_contents for cell in cells)
    for name in names_of_code(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            yield from _named_by(value, seen)
        elif value is not None:
            yield value


def _is_filled(cell: types.CellType) -> bool:
    try:
        return (cell.cell_contents, True)[1]
    except ValueError:
        return False


def _numbers_of(value: Any, *, deep: bool) -> list[Any]:
    """Return the numbers of an object, and of a container or a number itself if ``deep``."""
    if isinstance(value, int | float | list | dict | set | deque):
        return _numbers_in(value) if deep else []
    is_code = isinstance(value, type | types.ModuleType | types.FunctionType | nn.Module | Tensor)
    held: Mapping[str, Any] = {} if is_code else getattr(value, "__dict__", {})
    return [x for each in held.values() for x in _numbers_in(each)]


def _numbers_in(value: Any) -> list[Any]:
    if isinstance(value, int | float):
        return [value]
    if not isinstance(value, _CONTAINERS):
        return []
    inside = value.values() if isinstance(value, dict) else value
    parts = [each for each in inside if isinstance(each, int | float)]
    nested = [len(each) for each in inside if isinstance(each, _CONTAINERS)]
    return [len(value), *parts, *nested]
