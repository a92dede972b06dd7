"""Integers of configurations that a module's code reads while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import Tensor, nn


def integers_read(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield dotted name and value of integers of objects that a module holds, as ``config.heads``.

    Those whose names its class's code has, that of ``__init__`` left out.
    """
    read = _names_read(type(module))
    for holder, held in vars(module).items():
        if holder not in read or isinstance(held, nn.Module | Tensor | type):
            continue
        for name, value in getattr(held, "__dict__", {}).items():
            if name in read and type(value) is int:
                yield f"{holder}.{name}", value


def _names_read(cls: type[nn.Module]) -> set[str]:
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    functions = (
        function
        for base in bases
        for name, function in vars(base).items()
        if isinstance(function, FunctionType) and name != "__init__"
    )
    return {name for function in functions for name in _names_in(function)}


def _names_in(function: FunctionType) -> Iterator[str]:
    # Decorators keep what they wrap, and functions inside of functions are constants of theirs.
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, FunctionType):
        yield from _names_in(wrapped)
    todo = [function.__code__]
    while todo:
        code = todo.pop()
        yield from code.co_names
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
