"""Integers in a module's code that count what this rank has: heads, features."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

from torch import nn


def divide(module: nn.Module, fqn: str, attribute: str, parts: int) -> None:
    """Divide an integer that a module reads, its own or one of an object that it holds.

    A configuration that many modules hold is copied for this one, so that the others read what
    they did: ``"config.num_heads"``.

    Raises:
        ValueError: If there is no such integer, or ``parts`` does not divide it.
    """
    value = integer(module, attribute)
    if value is None or value % parts:
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected {fqn}.{attribute} to be an integer that "
            f"tensor-parallel ranks can divide by {parts}, got {value!r}; leave it out"
        )
    *path, name = attribute.split(".")
    holder: Any = module
    for each in path:
        own = copy.copy(getattr(holder, each))
        setattr(holder, each, own)
        holder = own
    setattr(holder, name, value // parts)


def integer(module: nn.Module, attribute: str) -> int | None:
    """Return the integer that an attribute is, dotted if another object holds it; or None."""
    try:
        value = attrgetter(attribute)(module)
    except AttributeError:
        return None
    return value if isinstance(value, int) else None
