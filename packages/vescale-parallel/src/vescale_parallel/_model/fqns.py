"""One name for modules that a model has under several."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
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


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches."""
    expression = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    return [name for name in names if expression.fullmatch(name)]


def generalize(fqn: str) -> str:
    """Return ``fqn`` with its numeric components replaced by ``*``."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def generalize_first(fqn: str) -> str:
    """Return ``fqn`` with its first numeric component, the block's, replaced by ``*``."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\g<1>*", fqn, count=1)


def stack_of(fqn: str) -> str:
    """Return the name of the stack of blocks that a module is in, empty outside of any."""
    parts = fqn.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[:first])
