"""Operators that draw random numbers: which they are, and how to draw in place of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor.random import RandomOperator, random_operator
from vescale_parallel._torch_private import TorchDispatchMode

_PERMUTATIONS = {torch.ops.aten.randperm.default, torch.ops.aten.randperm.generator}


def is_draw(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator is about to draw random numbers."""
    if not _may_draw(func):
        return False
    names = [argument.name for argument in func._schema.arguments]
    # What is as by default is not passed on.
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given = defaults | dict(zip(names, args, strict=False)) | dict(kwargs)
    if "dropout_p" in given or "scaled_dot_product" in func._schema.name:
        return bool(given.get("dropout_p", 0.0))
    return given.get("train", given.get("training", True)) is not False


@functools.cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class DrawMode(TorchDispatchMode):
    """Has :meth:`draw` run the operators that draw random numbers."""

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = is_draw(func, args, kwargs)
        return self.draw(func, args, kwargs) if draws else func(*args, **kwargs)


def drawn_shape(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of what an operator draws: of its first tensor, or what it is to make."""
    if func is torch.ops.aten.multinomial.default:
        return (*args[0].shape[:-1], args[1])  # of a table, which need not have rows
    if func in _PERMUTATIONS:
        return (args[0],)
    if isinstance(args[0], Tensor):
        return tuple(args[0].shape)
    sizes = next((arg for arg in args if isinstance(arg, list | tuple)), ())
    return tuple(sizes)


def draw_with(
    fill: Callable[[RandomOperator, Tensor], None],
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what an operator makes of numbers that ``fill`` draws in place of it.

    Raises:
        NotImplementedError: If it does not draw a number for each element.
    """
    how, like, out = drawn_into(func, args, kwargs)
    is_inplace = func._schema.name.endswith("_")
    fill(how, out)
    if how.finish is None:
        return like.copy_(out) if is_inplace and out is not like else out
    result = how.finish(out, args)
    return like.copy_(result) if is_inplace else result


def drawn_into(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[RandomOperator, Tensor, Tensor]:
    """Return how an operator draws, a tensor like its result, and one to draw into.

    Raises:
        NotImplementedError: If it does not draw a number for each element.
    """
    like = args[0] if isinstance(args[0], Tensor) else _empty(func, args, kwargs)
    how = random_operator(func, args, device_type=like.device.type)
    if how is None or not _is_element_wise(args):
        raise NotImplementedError(f"{func} does not draw element by element")
    is_inplace = func._schema.name.endswith("_")
    return how, like, _result(like, how, kwargs, is_inplace=is_inplace)


def _empty(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    given = {name: kwargs[name] for name in ("dtype", "device") if name in kwargs}
    if given.get("dtype") is None and func._schema.name == "aten::randint":
        given["dtype"] = torch.int64  # by default, and so not passed on
    return torch.empty(drawn_shape(func, args), **given)


def _result(
    like: Tensor, how: RandomOperator, kwargs: Mapping[str, Any], *, is_inplace: bool
) -> Tensor:
    """Return where to draw, as torch lays it out."""
    dtype: torch.dtype = how.dtype or kwargs.get("dtype") or like.dtype
    if is_inplace and how.finish is None and dtype == like.dtype:
        return like
    layout = kwargs.get("memory_format") or torch.preserve_format
    return torch.empty_like(like, dtype=dtype, memory_format=layout)


def _is_element_wise(args: tuple[Any, ...]) -> bool:
    """Whether all tensors among the arguments have the shape of what is drawn."""
    shapes = {tuple(arg.shape) for arg in args if isinstance(arg, Tensor)}
    return len(shapes) <= 1
