"""Names of attributes and globals that code refers to."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn


def names_of_class(cls: type[nn.Module]) -> set[str]:
    """Return the names that a module's class has in its code, that of ``__init__`` left out."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    functions = (
        function
        for base in bases
        for name, function in vars(base).items()
        if isinstance(function, FunctionType) and name != "__init__"
    )
    return {name for function in functions for name in _names_of_function(function)}


def names_of_code(code: CodeType) -> Iterator[str]:
    """Yield the names of code, and of functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of_code(constant)


def _names_of_function(function: FunctionType) -> Iterator[str]:
    # Decorators keep what they wrap.
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, FunctionType):
        yield from _names_of_function(wrapped)
    yield from names_of_code(function.__code__)
