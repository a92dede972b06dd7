"""The form of a call: what may steer the way that a forward takes, without sizes and values."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from vescale_parallel._model.inputs import children_of
from vescale_parallel._plan.config import TensorParallel

_BY_VALUE = (bool, str, type(None))


class CallForms:
    """Describes calls of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = inspect.signature(model.forward).parameters
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [name for name, p in self._parameters.items() if p.kind in named]

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without those that are as if not given."""
        given = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        given |= {f"*{i}": value for i, value in enumerate(args[len(self._names) :])}
        return {name: value for name, value in given.items() if not self._is_default(name, value)}

    def batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the arguments as an example batch, by name where each has one."""
        return (
            tuple(args)
            if len(args) > len(self._names) and not kwargs
            else self.named(args, kwargs)
        )

    def form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return a text that is the same for calls that differ in sizes and numbers alone."""
        named = self.named(args, kwargs)
        return ", ".join(f"{name}: {_form(named[name])}" for name in sorted(named))

    def _is_default(self, name: str, value: Any) -> bool:
        default = self._parameters[name].default if name in self._parameters else None
        return isinstance(value, _BY_VALUE) and value == default and type(value) is type(default)


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_kind(value)} {value.dim()}d"
    if isinstance(value, _BY_VALUE):
        return repr(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return "{" + ", ".join(f"{key}: {_form(each)}" for key, each in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_form, cast("Sequence[Any]", value))) + "]"
    # Of objects that pytree does not open, caches for example, what they hold is not looked at.
    held = ", ".join(map(_form, children_of(value)))
    return f"{type(value).__name__}({held})" if held else type(value).__name__


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "float"
    if tensor.is_complex():
        return "complex"
    return "bool" if str(tensor.dtype) == "torch.bool" else "int"


def proof_record(form: str, size: int, sharding_plan: Mapping[str, str]) -> str:
    """Return how a plan remembers that it was proven for a form of call."""
    return f"{form} #{_digest(form, size, sharding_plan)}"


def proven_forms(section: TensorParallel) -> list[str]:
    """Return the forms that a plan was proven for, with the very sharding plan that it has."""
    forms = [record.rpartition(" #")[0] for record in section.proven_calls]
    plan = section.sharding_plan
    return [f for f in forms if proof_record(f, section.size, plan) in section.proven_calls]


def _digest(form: str, size: int, sharding_plan: Mapping[str, str]) -> str:
    said = json.dumps([form, size, sorted(sharding_plan.items())])
    return hashlib.sha256(said.encode()).hexdigest()[:16]
