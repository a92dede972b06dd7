"""Parameters that parallelize replaced: whatever still holds them is told so.

An optimizer, an average of weights or a list that was made before ``parallelize`` holds tensors
that no call of the model uses any more. Nothing would fail, and nothing would train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_parallel._model.shape_questions import SHAPE_QUESTIONS

_MARK = "_vescale_replaced_as"
_ADVICE = (
    "which does not train any more: the model that parallelize returned has others. Make what "
    "trains it from that model: the optimizer in optimizer_fn, as in "
    "parallelize(plan, model, lambda model: AdamW(model.parameters())); schedulers, averages of "
    "weights and lists of parameters after parallelize"
)


class ReplacedParameter(nn.Parameter):
    """What a parameter of the model was before; any use of its values raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SHAPE_QUESTIONS:
            return super(nn.Parameter, cls).__torch_function__(func, types, args, kwargs or {})
        used = (x for x in _flat((args, kwargs)) if isinstance(x, ReplacedParameter))
        name = getattr(next(used, None), _MARK, "a parameter")
        what = getattr(func, "__name__", str(func))
        if what in ("__get__", "__set__"):
            what = f".{getattr(getattr(func, '__self__', None), '__name__', '')}"
        raise ValueError(f"{what} uses the tensor that {name!r} was before, {_ADVICE}")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]: torch has an argument
        return f"ReplacedParameter({getattr(self, _MARK, '')!r})"


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [x for each in value for x in _flat(each)] if isinstance(value, list | tuple) else [value]
    )


def mark_replaced(parameters: Mapping[str, nn.Parameter]) -> None:
    """Have what still uses parameters, given by FQN, raise."""
    _watch_optimizers()
    for fqn, parameter in parameters.items():
        setattr(parameter, _MARK, fqn)
        # Deferred ones are still read, for tensors that were computed from them.
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ReplacedParameter


_hooks: list[Any] = []


def _watch_optimizers() -> None:
    """Have steps of all optimizers of this process looked at, from now on."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse_replaced))


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    # Looked at once, and again when parameters were added.
    if vars(optimizer).get("_vescale_num_checked") == len(held):
        return
    replaced = [getattr(p, _MARK) for p in held if hasattr(p, _MARK)]
    if replaced:
        raise ValueError(
            f"this {type(optimizer).__name__} holds {len(replaced)} parameters that parallelize "
            f"has replaced ({replaced[0]!r}, ...). It would step on what they were before, "
            f"{_ADVICE}"
        )
    # What is compiled looks whenever it is traced; dynamo of torch 2.11 fails where an optimizer
    # that was made before is given an attribute.
    if not torch.compiler.is_compiling():
        optimizer.__dict__["_vescale_num_checked"] = len(held)
