"""Whether a forward computes something else in training than in evaluation.

Plans are compared with one device in evaluation, where chance plays no part. What a model only
does in training, a mean over features for example, would be compared with nothing: such a model
is run in both modes. Norms by statistics of the batch, which are the same operator in both, are
looked at where modules are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from vescale_parallel._model.code import names_of_class
from vescale_parallel._model.inputs import bind, opened

from .dry_run import DryRunError, dry_run
from .fake_run import Listener, Operator

# What computes nothing in evaluation, and in training only draws.
_DROPOUTS: Any = frozenset(
    (
        *(F.dropout, F.alpha_dropout, F.feature_alpha_dropout),
        *(F.dropout1d, F.dropout2d, F.dropout3d),
        *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
    )
)


def differs_in_training(model: nn.Module, batch: Any) -> bool:
    """Return whether one forward of a batch calls other operators in training.

    Of a model that needs values only its code is looked at.
    """
    if not any(map(_reads_mode, {type(module) for module in model.modules()})):
        return False
    try:
        return _operators(model, batch, training=True) != _operators(model, batch, training=False)
    except DryRunError:
        return True


def _reads_mode(cls: type[nn.Module]) -> bool:
    is_of_torch = cls.__module__.startswith("torch.nn.")
    return not is_of_torch and "training" in names_of_class(cls)


def _operators(model: nn.Module, batch: Any, *, training: bool) -> list[tuple[object, ...]]:
    heard = _Operators()

    def switch(copied: nn.Module) -> None:
        copied.train(training)

    with _WithoutDropout():
        dry_run(model, bind(model, opened(batch)), (), switch, lambda _: (heard,))
    return heard.found


class _Operators(Listener):
    """Notes the operators of a forward, the modules that they are in, and shapes."""

    def __init__(self) -> None:
        self.found: list[tuple[object, ...]] = []
        self._inside: list[str] = []

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._inside.append(fqn)

    def left(self, fqn: str, output: Any) -> None:
        self._inside.pop()

    def raised(self, fqn: str) -> None:
        self._inside.pop()

    def operator(self, ran: Operator) -> None:
        if not ran.is_integer:
            shapes = tuple(tuple(each.shape) for each in ran.inputs)
            self.found.append((self._inside[-1] if self._inside else "", str(ran.func), shapes))


class _WithoutDropout(TorchFunctionMode):
    """Has functions that leave out elements return what they are given."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func is F.scaled_dot_product_attention:
            # (query, key, value, mask, chance)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            given |= {"dropout_p": 0.0} if "dropout_p" in given else {}
        return func(*args, **given)
