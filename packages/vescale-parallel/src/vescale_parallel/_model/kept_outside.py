"""What code of a model keeps outside of it: lists, counters and caches of its files."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from .code import names_of_code
from .structures import leaves_of

# Their forwards keep nothing there.
_OWN = ("vescale", "vescale_parallel", "vescale_dtensor")
_LIBRARIES = frozenset({"torch", "numpy", "transformers", *_OWN})
_MOST_FUNCTIONS, _DEEPEST = 5000, 4
# No subclasses: reading one may do anything.
_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter)
# What most names stand for: all are looked at behind every module of a run.
_HOLD_NOTHING = frozenset((str, int, bool, float, type(None), FunctionType, MethodType, property))


class KeptOutside:
    """What functions of a model's classes, of its modules, and that these name, keep in globals.

    [Note: trial runs leave nothing behind] A model is run on a few rows, in copies, to see what it
    does. Copies have attributes of their own, but a list in the model's file is one for all: a
    balancing loss that a layer appends there, for the loop to add, would be that of the trial,
    too. So what code names is looked up before: globals, variables of closures, attributes of
    classes and of objects that are no modules. Containers get the elements back that they had,
    and names their values.

    Args:
        model: Whose classes' code is looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._put_back: list[Callable[[], None]] = []
        self._places: list[tuple[str, Callable[[], Any]]] = []
        self._containers = set[int]()
        self._objects: dict[int, Any] = {}
        self._path: list[int] = []  # of objects within objects
        self._visited = set[int]()
        self._functions: list[Any] = []
        for cls in {type(module) for module in model.modules()}:
            for base in cls.__mro__:
                if base is not nn.Module and not _is_library(base.__module__):
                    self._functions += [_function(value) for value in vars(base).values()]
        for module in model.modules():
            held = vars(module).values()
            self._functions += [each for each in held if isinstance(each, FunctionType)]
        while self._functions and len(self._visited) < _MOST_FUNCTIONS:
            self._look_into(self._functions.pop())

        self._before = [each for _, place in self._places for each in _with_graphs(place())]

    @property
    def may_change(self) -> bool:
        """Whether there is anything that code of the model names."""
        return bool(self._places)

    def put_back(self) -> None:
        """Put back what was there when this was made."""
        for each in self._put_back:
            each()

    def handed_over(self) -> list[tuple[str, Tensor]]:
        """Return new tensors with a graph, each with the name of what holds it."""
        before = {*map(id, self._before)}
        return [
            (name, x)
            for name, place in self._places
            for x in _with_graphs(place())
            if id(x) not in before
        ]

    def _look_into(self, function: Any) -> None:
        if not isinstance(function, FunctionType) or id(function) in self._visited:
            return
        self._visited.add(id(function))
        self._functions.append(getattr(function, "__wrapped__", None))
        # A wrapper says that it is of the module of what it wraps; its code is not.
        if any(map(_is_library, (function.__module__, function.__globals__.get("__name__")))):
            return
        names = {*names_of_code(function.__code__)}
        for name in names & function.__globals__.keys():
            self._keep_binding(function.__globals__, name, name)
            self._keep(name, function.__globals__[name], names)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._keep_cell(name, cell, names)
        for value in function.__defaults__ or ():
            self._keep("a default", value, names)

    def _keep(self, name: str, value: Any, names: set[str]) -> None:
        """Keep what a name stands for, as far as code with these names can change it."""
        if isinstance(value, nn.Module | Tensor) or id(value) in self._containers:
            return
        if type(value) in _CONTAINERS:
            self._keep_container(name, value)
        elif isinstance(value, FunctionType):
            self._functions.append(value)
        elif isinstance(value, MethodType):
            self._functions.append(value.__func__)
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__):
                self._keep_attributes(value.__name__, vars(value), names)
        elif hasattr(type(value), "cache_clear"):  # of functools.cache
            self._keep_cache(value)
        elif not _is_library(getattr(type(value), "__module__", "")) or isinstance(value, type):
            self._keep_object(name, value, names)

    def _keep_object(self, name: str, value: Any, names: set[str]) -> None:
        cls = value if isinstance(value, type) else type(value)
        if _is_library(cls.__module__) or issubclass(cls, nn.Module):
            return
        for base in cls.__mro__[:-1]:
            for each in names & vars(base).keys():
                self._functions.append(_function(vars(base)[each]))
                self._keep(each, vars(base)[each], set())
                if base is value:
                    self._keep_of_class(base, each)
        attributes = None if isinstance(value, type) else getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and id(value) not in self._objects:
            self._objects[id(value)] = value
            self._keep_attributes(name, cast("dict[str, Any]", attributes), None)

    def _keep_of_class(self, cls: type, name: str) -> None:
        before = vars(cls)[name]
        self._places.append((f"{cls.__name__}.{name}", lambda: getattr(cls, name, None)))

        def put_back() -> None:
            if vars(cls).get(name) is not before:
                setattr(cls, name, before)

        if _is_plain(before):
            self._put_back.append(put_back)

    def _keep_attributes(
        self, name: str, attributes: MutableMapping[str, Any], names: set[str] | None
    ) -> None:
        if id(attributes) in self._path or len(self._path) == _DEEPEST:
            return
        self._path.append(id(attributes))
        for each in [*attributes] if names is None else names & attributes.keys():
            self._keep_binding(attributes, each, f"{name}.{each}")
            self._keep(f"{name}.{each}", attributes[each], names or set())
        self._path.pop()

    def _keep_binding(self, space: MutableMapping[str, Any], name: str, said: str) -> None:
        before = space[name]
        if not _is_plain(before):
            return
        self._places.append((said, lambda: space.get(name)))

        def put_back() -> None:
            if space.get(name) is not before:
                space[name] = before

        self._put_back.append(put_back)

    def _keep_cell(self, name: str, cell: CellType, names: set[str]) -> None:
        try:
            before = cell.cell_contents
        except ValueError:  # not filled
            return
        self._keep(name, before, names)
        if _is_plain(before):
            self._places.append((name, lambda: cell.cell_contents))

            def put_back() -> None:
                cell.cell_contents = before

            self._put_back.append(put_back)

    def _keep_container(self, name: str, held: Any) -> None:
        before = dict(held) if isinstance(held, dict) else [*held]
        self._containers.add(id(held))
        self._places.append((name, lambda: held))

        def put_back() -> None:
            now = [*held.items()] if isinstance(held, dict) else [*held]
            old = [*before.items()] if isinstance(before, dict) else before
            if len(now) == len(old) and all(map(_same, now, old)):
                return
            held.clear()
            (held.extend if isinstance(held, list | deque) else held.update)(before)

        self._put_back.append(put_back)

    def _keep_cache(self, cached: Any) -> None:
        before = cached.cache_info().currsize if hasattr(cached, "cache_info") else None
        self._functions.append(getattr(cached, "__wrapped__", None))
        if before is None:
            return

        def put_back() -> None:
            if cached.cache_info().currsize != before:
                cached.cache_clear()

        self._put_back.append(put_back)


@contextmanager
def nothing_kept_outside(model: nn.Module) -> Iterator[KeptOutside]:
    """Put back what code of a model keeps outside of it; trial runs leave nothing behind."""
    kept = KeptOutside(model)
    try:
        yield kept
    finally:
        kept.put_back()


def filled_by(model: nn.Module, fqns: Collection[str]) -> set[str]:
    """Return what will hold the names of modules that put tensors into a list they are given."""
    found = set[str]()

    def watch(fqn: str, module: nn.Module) -> None:
        given: list[set[int]] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            given.append({*map(id, leaves_of((args, kwargs)))})

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            known = given.pop()
            leaves = (x for x in leaves_of((args, kwargs)) if id(x) not in known)
            if any(isinstance(x, Tensor) and x.grad_fn is not None for x in leaves):
                found.add(fqn)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    for fqn in fqns:
        watch(fqn, model.get_submodule(fqn))
    return found


def filled_error(fqn: str) -> str:
    """Return why a pipeline refuses such a module."""
    return (
        f"{fqn!r} puts tensors into a list or a dict that it is given, which no other stage of a "
        "pipeline has: what comes behind its stage would not find them there. Have it return "
        "them, or add them up from block to block as an argument, or name the blocks within it "
        "in pipeline_parallel.block_calls if it has some, or use pipeline_parallel.size 1"
    )


def _function(value: Any) -> Any:
    """Return the function in what a class has by a name."""
    if isinstance(value, staticmethod | classmethod):
        return cast("Any", value).__func__
    return value.fget if isinstance(value, property) else value


def _is_library(name: str | None) -> bool:
    top = (name or "").partition(".")[0]
    return top in _LIBRARIES or top in sys.stdlib_module_names


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple | Tensor)


def _with_graphs(held: Any) -> list[Tensor]:
    if type(held) in _HOLD_NOTHING:
        return []
    leaves = leaves_of([*held] if isinstance(held, deque | set) else held)
    return [x for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None]


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is tuple and len(a) == len(b) == 2 and a[0] is b[0] and a[1] is b[1])


def handed_over_error(name: str) -> str:
    """Return that what has a gradient was put where no module is, in a pipeline."""
    return (
        f"forward puts what has a gradient into {name!r}, which belongs to no module: each stage "
        "of a pipeline would have there what its own blocks put there, of each micro-batch. "
        "Return it from the block, add it up from block to block as an argument, or use "
        "pipeline_parallel.size 1"
    )
