"""Functions of a package that torch.compile leaves as they are written."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ._torch_private import skip_frame


def leave_uncompiled(package: str) -> None:
    """Have torch.compile begin no program in the functions of a package.

    Where a graph breaks, and in a backward pass, it compiles by itself every function that is
    called: hooks of autograd, what modes do with an operator. Those of ours send, free memory and
    exchange what objects are, which a program that begins in their midst does not see. Where it
    comes to a function from one that it traces already, it goes on tracing.

    Args:
        package: The name of an imported package. Of modules imported later, nothing is known.
    """
    seen = set[int]()
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for value in list(vars(module).values()):
                for function in _functions(value, package, seen):
                    for code in _within(function.__code__):
                        skip_frame(code)


def _functions(value: Any, package: str, seen: set[int]) -> Iterator[FunctionType]:
    """Yield what a package's functions, methods and decorated ones are made of."""
    if id(value) in seen or isinstance(value, ModuleType):
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, FunctionType):
        if str(value.__module__).startswith(package):
            yield value
        parts = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    elif isinstance(value, type):
        parts = [*vars(value).values()] if str(value.__module__).startswith(package) else []
    elif isinstance(value, staticmethod | classmethod):
        parts = [value.__func__]
    elif isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    elif isinstance(value, functools.partial | functools.cached_property):
        parts = [value.func]
    elif isinstance(value, functools._lru_cache_wrapper):
        parts = [value.__wrapped__]
    elif isinstance(value, dict | list | tuple):
        parts = [*value.values()] if isinstance(value, dict) else [*value]
    for part in parts:
        yield from _functions(part, package, seen)


def _within(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return (cell.cell_contents, True)[1]
    except ValueError:
        return False
