"""Code of functions: the names that it refers to, and what compilers tell apart or leave out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, cast

import torch
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


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same and shares its code object with no other one.

    torch.compile counts programs by code object. What wraps every module of a model has one, and
    after ``torch._dynamo.config.recompile_limit`` modules the others would not be compiled.
    """
    plain = cast("FunctionType", function)
    own = FunctionType(
        plain.__code__.replace(),
        plain.__globals__,
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    return functools.update_wrapper(own, getattr(plain, "__wrapped__", plain))


def left_out(function: Callable[..., Any], why: str) -> Callable[..., Any]:
    """Return a function that runs as it is written in what torch compiles: graphs break there.

    Args:
        function: Is not traced, nor is what it calls.
        why: What is said of the break.
    """
    return cast("Any", torch.compiler).disable(function, reason=why)
