"""Functions that torch's compiler tells apart, although they were written once, or leaves out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch


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
