"""Which blocks are alike: all that their code can ask of themselves is equal."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor, nn

_PLAIN = (bool, float, str, bytes, type(None), torch.dtype, torch.device)
_TENSORS = "_parameters", "_buffers"


def form_of(module: nn.Module, fqn: str) -> Hashable:
    """Return what is equal for modules that do the same to the shapes of their arguments.

    Classes, plain attributes, and shapes and dtypes of tensors; other objects have to be the same
    ones. Blocks of a model are numbered, and keep their number: it counts as equal.

    Args:
        module: Any; what the result refers to has to outlive it.
        fqn: Its name, which ends with the number of a block.
    """
    last = fqn.rpartition(".")[2]
    number = int(last) if last.isdigit() else None
    return tuple((name, type(each), _held(each, number)) for name, each in module.named_modules())


def _held(module: nn.Module, number: int | None) -> Hashable:
    found: list[Hashable] = []
    for name, value in vars(module).items():
        if name in _TENSORS:
            found += ((key, _said(each, number)) for key, each in value.items())
        elif name != "_modules" and value != {}:
            found.append((name, _said(value, number)))
    return tuple(found)


def _said(value: Any, number: int | None) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, int):
        return "its number" if value == number else value
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return type(items), tuple(_said(each, number) for each in items)
    if isinstance(value, set | frozenset):
        held = cast("set[Any]", value)
        return frozenset(_said(each, number) for each in held)
    return id(value)
