"""What a call of a module leaves behind, which two calls in the place of one would leave twice."""

from __future__ import annotations

import gc
import math
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_parallel._model.code import names_of_code
from vescale_parallel._model.copies import tensors_in_attributes
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import (
    generator_state,
    states_of_generators,
    untouched_generators,
)

from .experts import close

_CONTAINERS = (list, dict, set, deque)


def what_stays(module: nn.Module, experts: list[nn.Module], given: tuple[Tensor, ...]) -> str:
    """Return what a call of a module in training leaves behind; empty if that is nothing.

    But for what it keeps in its own buffers and attributes, which a first pass leaves alone. What
    experts assign to theirs may stay, if the next call of the same inputs does so alike.
    """
    made = _Results()
    module.train()
    with torch.no_grad():
        module(*given)
        state, outside = [*map(kept, experts)], numbers_outside(module)  # what is made once, is
        with made:
            module(*given)
        is_same = all(map(same, state, map(kept, experts)))
        module(*given)
    module.eval()
    if not is_same:
        return "its experts write to their buffers, or keep something from call to call"
    own = [*module.buffers(), *(tensor for *_, tensor in tensors_in_attributes(module))]
    if made.num_alive(beside=own):
        return "its forward hands tensors to a list or an object outside of it, in each call"
    if outside != numbers_outside(module):
        return "its forward adds to a list or to numbers outside of it, in each call"
    return ""


def generators_after(
    module: nn.Module, trained: Iterable[nn.Module], given: tuple[Tensor, ...]
) -> tuple[bytes, ...]:
    """Return where a call leaves torch's generators, as seeded, if some modules are in training.

    Raises:
        ValueError: If it draws from others.
    """
    module.eval()
    for each in trained:
        each.training = True
    with torch.no_grad(), untouched_generators(seed=0):
        host = states_of_generators()
        module(*given)
        if host.differs_outside_of_torch(states_of_generators()):
            raise ValueError("it draws from Python's random or from numpy; draw by torch")
        drawn = generator_state()
    module.eval()
    return drawn


def draws_in_training(module: nn.Module, given: tuple[Tensor, ...]) -> bool:
    """Whether a call in training draws random numbers.

    Raises:
        ValueError: If another one does, too.
    """
    with untouched_generators(seed=0):
        nothing = generator_state()
    if generators_after(module, (), given) != nothing:
        raise ValueError("it draws random numbers in evaluation, too")
    return generators_after(module, module.modules(), given) != nothing


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

    def num_alive(self, beside: Iterable[Tensor]) -> int:
        """Return how many there are beside some, and that no graph of autograd or cycle holds."""
        gc.collect()
        known = {id(tensor) for tensor in beside}
        alive = (each() for each in self._made)
        return sum(each is not None and id(each) not in known for each in alive)


def kept(module: nn.Module, *, beside: Collection[nn.Module] = ()) -> list[Any]:
    """Return what a module keeps from call to call: tensors, numbers, and lengths of lists.

    And what those in it keep that are not ``beside``.
    """
    named = {fqn: each for fqn, each in module.named_modules() if each not in beside}
    held = [buffer for each in named.values() for buffer in each.buffers(recurse=False)]
    held += [tensor for fqn, _, tensor in tensors_in_attributes(module) if fqn in named]
    values = [value for each in named.values() for value in vars(each).values()]
    numbers = [value for value in values if isinstance(value, int | float)]
    lists = [len(value) for value in values if isinstance(value, list | dict)]
    return [*(tensor.detach().clone() for tensor in held), [*numbers, *lists]]


def same(before: list[Any], after: list[Any]) -> bool:
    """Whether what was kept is, but for rounding, what is kept."""
    *tensors, numbers = before
    *tensors_after, numbers_after = after
    if len(tensors) != len(tensors_after) or len(numbers) != len(numbers_after):
        return False
    return all(map(math.isclose, numbers, numbers_after)) and all(
        map(close, tensors_after, tensors)
    )


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
