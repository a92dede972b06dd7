"""Which random numbers does an operator of torch draw, and what does it make of them?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._draw_rules import Fill

_aten = torch.ops.aten
_Operator = Callable[..., Any]
_Args = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RandomOperator:
    """How an operator makes its result from numbers that are drawn for each of its elements.

    Attributes:
        fill: What is drawn.
        dtype: Of what is drawn; None for that of the result.
        finish: Makes the result from what was drawn and the arguments, element by element, so on
            a shard of each just as well. The result of an in-place operator is still to be copied
            to its first argument. None if what was drawn is the result.
    """

    fill: Fill
    dtype: torch.dtype | None = None
    finish: Callable[[Tensor, _Args], Any] | None = None


_UNIT_UNIFORM = Fill("uniform_", (0.0, 1.0))
_UNIT_NORMAL = Fill("normal_", (0.0, 1.0))

# The in-place methods, with the defaults of their schemas.
_METHODS: dict[_Operator, Fill] = {
    _aten.uniform_.default: _UNIT_UNIFORM,
    _aten.normal_.default: _UNIT_NORMAL,
    _aten.random_.default: Fill("random_", ()),
    _aten.random_.to: Fill("random_", ()),
    getattr(_aten.random_, "from"): Fill("random_", ()),
    _aten.bernoulli_.float: Fill("bernoulli_", (0.5,)),
    _aten.bernoulli.p: Fill("bernoulli_", ()),
    _aten.exponential_.default: Fill("exponential_", (1.0,)),
    _aten.log_normal_.default: Fill("log_normal_", (1.0, 2.0)),
    _aten.cauchy_.default: Fill("cauchy_", (0.0, 1.0)),
    _aten.geometric_.default: Fill("geometric_", ()),
}
# By the overload without a generator, which makes no difference.
_FACTORIES: dict[str, Callable[[_Args], Fill]] = {
    "aten.rand.default": lambda args: _UNIT_UNIFORM,
    "aten.rand_like.default": lambda args: _UNIT_UNIFORM,
    "aten.randn.default": lambda args: _UNIT_NORMAL,
    "aten.randn_like.default": lambda args: _UNIT_NORMAL,
    "aten.randint.default": lambda args: Fill("random_", (0, args[0])),
    "aten.randint.low": lambda args: Fill("random_", (args[0], args[1])),
    "aten.randint_like.default": lambda args: Fill("random_", (0, args[1])),
    "aten.randint_like.low_dtype": lambda args: Fill("random_", (args[1], args[2])),
    "aten.normal.float_float": lambda args: Fill("normal_", (args[0], args[1])),
}
_FINISHED: tuple[_Operator, ...] = (
    _aten.bernoulli.default,
    _aten.bernoulli.Tensor,
    _aten.bernoulli_.Tensor,
    _aten.normal.Tensor_float,
    _aten.normal.float_Tensor,
    _aten.normal.Tensor_Tensor,
    _aten.native_dropout.default,
)


def _factory(func: _Operator) -> Callable[[_Args], Fill] | None:
    name = str(func).replace(".generator", ".default").replace("_generator", "")
    return _FACTORIES.get(name)


_LIKES = (_aten.rand_like, _aten.randn_like, _aten.randint_like)
# Those whose first argument is a tensor.
OPERATORS_ON_TENSORS: tuple[Any, ...] = (
    *_METHODS,
    *_FINISHED,
    *filter(_factory, (getattr(like, name) for like in _LIKES for name in like.overloads())),
)


def fill_of(func: _Operator, args: _Args) -> Fill | None:
    """Return the fill that is all that ``func`` does for its result, None if it does more.

    Args:
        func: An overload of ``torch.ops.aten``.
        args: Its positional arguments. Shapes among them are not looked at.
    """
    if func in _METHODS:
        fill = _METHODS[func]
        given = args[1:]
        return Fill(fill.method, (*given, *fill.parameters[len(given) :]))
    factory = _factory(func)
    return None if factory is None else factory(args)


def random_operator(
    func: _Operator, args: _Args, *, device_type: str = "cpu"
) -> RandomOperator | None:
    """Return how ``func`` makes its result, None if not from numbers drawn for each element.

    None is also for dropout that is not training, which draws nothing.

    Args:
        func: An overload of ``torch.ops.aten``.
        args: Its positional arguments.
        device_type: Where it runs. Other devices than the CPU have kernels of their own for
            bernoulli with a tensor and for dropout, which are not known here.

    Example:
        >>> probabilities = torch.tensor([0.0, 1.0])
        >>> found = random_operator(torch.ops.aten.bernoulli.default, (probabilities,))
        >>> found.finish(torch.rand(2, dtype=found.dtype), (probabilities,))
        tensor([0., 1.])
    """
    fill = fill_of(func, args)
    if fill is not None:
        return RandomOperator(fill)
    match func:
        case _aten.normal.Tensor_float:
            std = args[1] if len(args) > 1 else 1.0
            return RandomOperator(Fill("normal_", (0.0, std)), None, _add_mean)
        case _aten.normal.float_Tensor | _aten.normal.Tensor_Tensor:
            return RandomOperator(_UNIT_NORMAL, None, _scale_and_add_mean)
        case _ if device_type != "cpu":
            return None
        case _aten.bernoulli.default:
            return RandomOperator(_UNIT_UNIFORM, _bernoulli_dtype(args[0]), _bernoulli)
        case _aten.bernoulli.Tensor | _aten.bernoulli_.Tensor:
            return RandomOperator(_UNIT_UNIFORM, _bernoulli_dtype(args[1]), _bernoulli)
        case _aten.native_dropout.default if args[2] is None or args[2]:
            fill = Fill("bernoulli_", (1.0 - args[1],))
            return RandomOperator(fill, torch.bool, _dropout)
        case _:
            return None


def _bernoulli_dtype(probabilities: Tensor) -> torch.dtype:
    """Return in what precision torch compares with probabilities."""
    return torch.float64 if probabilities.dtype is torch.float64 else torch.float32


def _bernoulli(drawn: Tensor, args: _Args) -> Tensor:
    like, probabilities = args[0], args[-1]
    return (drawn < probabilities.to(drawn.dtype)).to(like.dtype)


def _add_mean(drawn: Tensor, args: _Args) -> Tensor:
    return drawn.add_(args[0])


def _scale_and_add_mean(drawn: Tensor, args: _Args) -> Tensor:
    mean, std = args[:2]
    return drawn.mul_(std).add_(mean)


def _dropout(kept: Tensor, args: _Args) -> tuple[Tensor, Tensor]:
    tensor, p = args[:2]
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    # In this order: lower precisions round the scale first.
    return tensor * kept.to(tensor.dtype).mul_(scale), kept
