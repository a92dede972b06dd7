"""Modes and flags of modules, by which their code may take another way from one call to the next.

Counters are no such ones: a number would be another one in every call.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel._model.copies import pairs

# By module and attribute.
Flags = tuple[tuple[str, str, Any], ...]


def flags_of(model: nn.Module) -> Flags:
    """Return the modes and public flags of all modules: booleans and words."""
    return tuple(
        (fqn, name, value)
        for fqn, module in model.named_modules()
        for name, value in vars(module).items()
        if _is_flag(name, value)
    )


def set_flags(copied: nn.Module, model: nn.Module) -> None:
    """Have the modules of a copy take the ways that those of a model take now, in place."""
    copied.train(model.training)
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
