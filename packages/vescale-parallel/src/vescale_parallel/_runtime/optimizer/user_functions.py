"""What a user's functions make of a model: its optimizer and the scheduler of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from .parallelize_optimizer import parallelize_optimizer

# A function of the model, or the class of an optimizer.
OptimizerFn = Callable[[nn.Module], Optimizer | Sequence[Optimizer]] | type[Optimizer]


def train_parts(
    model: nn.Module,
    optimizer_fn: OptimizerFn | None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None,
) -> list[Any]:
    """Return a parallelized model, its optimizer and its scheduler, those that are made."""
    parts: list[Any] = [model]
    if optimizer_fn is not None:
        optimizer = parallelize_optimizer(_optimizer_of(optimizer_fn, model), model)
        parts.append(optimizer)
        if lr_scheduler_fn is not None:
            parts.append(_scheduler_of(lr_scheduler_fn, optimizer))
    return parts


def _optimizer_of(optimizer_fn: OptimizerFn, model: nn.Module) -> object:
    """Return the optimizer of a model from a function, or from an optimizer's class.

    Raises:
        TypeError: If the function does not take a model, with what it raised.
    """
    # A class, or functools.partial of one.
    made_by = getattr(optimizer_fn, "func", optimizer_fn)
    if isinstance(made_by, type) and issubclass(made_by, Optimizer):
        return cast("Any", optimizer_fn)(model.parameters())
    return _called(
        "optimizer_fn", cast("Any", optimizer_fn), model, "lambda model: AdamW(model.parameters())"
    )


def _scheduler_of(lr_scheduler_fn: Callable[[Optimizer], Any], optimizer: Optimizer) -> object:
    """Return the scheduler of an optimizer.

    Raises:
        TypeError: If the function does not take an optimizer, with what it raised, or returns
            nothing that steps.
    """
    example = "lambda optimizer: StepLR(optimizer, step_size=10)"
    scheduler = _called("lr_scheduler_fn", lr_scheduler_fn, optimizer, example)
    if not hasattr(scheduler, "step"):
        raise TypeError(
            "expected lr_scheduler_fn to return a scheduler (with step()), got "
            f"{type(scheduler).__name__}; lr_scheduler_fn={example}"
        )
    return scheduler


def _called(name: str, function: Callable[[Any], Any], argument: object, example: str) -> object:
    """Call a user's function; say how it is called if that is what went wrong."""
    try:
        return function(argument)
    except TypeError as error:
        raise TypeError(
            f"{name} is called with {'the model' if name == 'optimizer_fn' else 'the optimizer'} "
            f"alone, and raised: {error}; expected a function such as {name}={example}"
        ) from error
