"""Modes and flags of modules, by which their code may take another way from one call to the next.

Counters are no such ones: a number would be another one in every call.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel._model.copies import give_own_hooks, pairs

# By module and attribute.
Flags = tuple[tuple[str, str, Any], ...]

# What others look at; torch's encoders are kept from nested tensors where attention is sharded.
_ELSEWHERE = {"training", "gradient_checkpointing", "use_nested_tensor"}
# Of a flag; one that takes more counts something, and would be compared in every call.
_MOST_VALUES = 4


def flags_of(model: nn.Module) -> Flags:
    """Return the modes and public flags of all modules: booleans and words."""
    return tuple(
        (fqn, name, value)
        for fqn, module in model.named_modules()
        for name, value in vars(module).items()
        if _is_flag(name, value)
    )


class ChangedFlags:
    """Knows which modes and flags of a model's modules are others than when it was made.

    Not whether they are in training, which comparisons look at in both, nor whether transformers
    has blocks run again in backward. One that takes many values is passed over.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = {(fqn, name): value for fqn, name, value in flags_of(model)}
        self._values: dict[tuple[str, str], set[Any]] = {}

    def of(self, model: nn.Module) -> Flags:
        """Return those that are others now."""
        changed = [
            (fqn, name, value)
            for fqn, name, value in flags_of(model)
            if self._before.get((fqn, name)) != value and name not in _ELSEWHERE
        ]
        for fqn, name, value in changed:
            self._values.setdefault((fqn, name), set()).add(value)
        return tuple(each for each in changed if len(self._values[each[:2]]) <= _MOST_VALUES)

    def put_on(self, copied: nn.Module, model: nn.Module) -> None:
        """Give modules of a copy those that ever changed as they are now, in place.

        And the hooks that they have added to themselves: a flag may say that they have.
        """
        give_own_hooks(copied, model)
        modules = dict(copied.named_modules())
        for fqn, name, value in flags_of(model):
            if (fqn, name) in self._values and fqn in modules:
                setattr(modules[fqn], name, value)


def set_flags(copied: nn.Module, model: nn.Module) -> None:
    """Have the modules of a copy take the ways that those of a model take now, in place."""
    copied.train(model.training)
    give_own_hooks(copied, model)
    for module, live in pairs(copied, model):
        vars(module).update(
            (name, value)
            for name, value in vars(live).items()
            if _is_flag(name, value) or _runs_again(value)
        )


def _is_flag(name: str, value: Any) -> bool:
    return type(value) in (bool, str) and not name.startswith("_")


def _runs_again(value: Any) -> bool:
    """Whether it is how transformers has blocks run again in backward."""
    return isinstance(value, functools.partial) and value.func is checkpoint
