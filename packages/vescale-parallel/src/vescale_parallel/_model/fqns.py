"""One name for modules that a model has under several."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from torch import nn

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def once_each(named: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return modules by their first names, and the other names with the first ones."""
    first: dict[int, str] = {}
    for fqn, module in named.items():
        first.setdefault(id(module), fqn)
    others = {fqn: first[id(module)] for fqn, module in named.items()}
    return (
        {fqn: module for fqn, module in named.items() if others[fqn] == fqn},
        {fqn: name for fqn, name in others.items() if fqn != name},
    )


def renamed_owner(fqn: str, names: Mapping[str, str]) -> str:
    """Return a parameter's name with that of its module replaced."""
    owner, dot, name = fqn.rpartition(".")
    return f"{names.get(owner, owner)}{dot}{name}"


def merged(said: Mapping[K, V], rename: Callable[[K], K]) -> dict[K, V]:
    """Rename the keys of what a plan says.

    Raises:
        ValueError: If it says different things of what has one name afterwards.
    """
    found: dict[K, V] = {}
    for key, value in said.items():
        name = rename(key)
        if found.setdefault(name, value) != value:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {key!r} is {name!r} under another name, and "
                f"the plan has {value!r} for it and {found[name]!r}; say the same of both"
            )
    return found
