"""A loss that is computed from a model's outputs: its forward takes the targets and returns it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

LossFn = Callable[[Any, Any], Any]
_TARGET = "target"


def check_loss_fn(model: nn.Module, loss_fn: object) -> None:
    """Refuse what cannot be a loss of this model's outputs.

    Raises:
        TypeError: If it is no function.
        ValueError: If it has parameters, or the model's forward cannot take targets.
    """
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise TypeError(
            "expected loss_fn to be a function of the model's output and the targets, got "
            f"{loss_fn!r}; for example torch.nn.functional.cross_entropy"
        )
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ValueError(
            f"loss_fn {type(loss_fn).__name__} has parameters, which nobody would shard or train; "
            "make it a part of the model, whose forward then returns the loss"
        )
    if "forward" in vars(model):
        raise ValueError(
            "loss_fn needs the forward of the model's class, but this model has one of its own "
            "(model.forward = ...); have that compute the loss"
        )
    if _TARGET in inspect.signature(type(model).forward).parameters:
        raise ValueError(
            f"{type(model).__name__}.forward takes {_TARGET!r} itself, the name of what loss_fn "
            "gets; have forward compute the loss, without loss_fn"
        )


def give_loss(model: nn.Module, loss_fn: LossFn) -> Callable[[], None]:
    """Have forward take ``target`` and return the loss then, in place; return what undoes it.

    It is a keyword, and the argument behind the positional ones. A call without it returns what
    it did before.
    """
    cls = type(model)
    forward, signature = cls.forward, _with_target(inspect.signature(cls.forward))

    @functools.wraps(forward)
    def with_loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        target = given.arguments.pop(_TARGET, None)
        output = forward(*given.args, **given.kwargs)
        return output if target is None else loss_fn(output, target)

    with_loss.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]: inspect's own
    namespace = {"forward": with_loss, "__module__": cls.__module__}
    model.__class__ = type(cls.__name__, (cls,), namespace)

    def undo() -> None:
        model.__class__ = cls

    return undo


def _with_target(signature: inspect.Signature) -> inspect.Signature:
    kind = inspect.Parameter
    parameters = [*signature.parameters.values()]
    before = [
        p for p in parameters if p.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)
    ]
    is_open = any(p.kind is kind.VAR_POSITIONAL for p in parameters)
    place = len(before)
    how = kind.POSITIONAL_OR_KEYWORD
    if is_open:
        how, place = kind.KEYWORD_ONLY, place + 1
    parameters.insert(place, kind(_TARGET, how, default=None))
    return signature.replace(parameters=parameters)
