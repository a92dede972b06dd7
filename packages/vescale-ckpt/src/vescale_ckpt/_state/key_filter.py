"""The key filter: which part of a checkpoint a load wants, and what keys are called here.

A path is the dotted key of a place in the state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vescale_ckpt._format.state_tree import Json, dotted, items_of, leaves, with_items
from vescale_ckpt.exceptions import CheckpointError

_Items = Sequence[tuple[str | int, Json]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFilter:
    r"""The options of a load that say which keys it is about.

    Attributes:
        only: Regular expressions for whole dotted keys of the given state; what lies below a
            key that matches is wanted, too. None for everything.
        rename: Regular expressions for whole dotted keys of the checkpoint, and what such a key
            is called here (``\1`` stands for the first group). The first that matches counts.
    """

    only: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for pattern in (*(self.only or ()), *self.rename):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error

    def wants(self, path: str) -> bool:
        """Return whether all that lies at and below ``path`` is wanted."""
        if self.only is None:
            return True
        keys = [*_with_parents(path)]
        return any(re.fullmatch(pattern, key) for pattern in self.only for key in keys)

    def wanted_leaves(self, node: Json, path: str) -> list[str]:
        """Return where below ``path`` something is wanted: ``path`` itself if all is."""
        if self.wants(path):
            return [path]
        return [leaf for leaf in leaves(node, path) if self.wants(leaf)]


def key_filter_of(only: Iterable[str] | None, rename: Mapping[str, str] | None) -> KeyFilter:
    """Return the selection that a user has described.

    Raises:
        ValueError: If a pattern is no regular expression, or ``only`` is a single string.
    """
    if isinstance(only, str):
        raise ValueError(f"expected a list of patterns as only, got the string {only!r}")
    return KeyFilter(only=None if only is None else tuple(only), rename=dict(rename or {}))


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Return what the first rule that matches all of ``name`` makes of it."""
    for pattern, template in rename.items():
        if found := re.fullmatch(pattern, name):
            return found.expand(template)
    return name


class RenamedTree:
    """A stored tree whose leaves have the names that they have here.

    Attributes:
        tree: The tree without the leaves that have another name here.
        moved: Those leaves, by their dotted key here.
        idle: Complaints about patterns that match nothing.
    """

    def __init__(self, tree: Mapping[str, Json], key_filter: KeyFilter) -> None:
        self.tree = dict(tree)
        self.moved: dict[str, Json] = {}
        self._rename = dict(key_filter.rename)
        self._unused = set(key_filter.rename)
        if key_filter.rename:
            self.tree = {str(key): node for key, node in self._staying(list(tree.items()), "")}
            self._check()
        self._parents = {parent for key in self.moved for parent in _with_parents(key)}
        self._parents -= self.moved.keys()
        self.idle = [f"rename {pattern!r} matches nothing" for pattern in sorted(self._unused)]
        self.idle += self._idle_only(key_filter.only or ())

    def holds_below(self, key: str) -> bool:
        """Return whether a leaf was moved to somewhere below ``key``."""
        return key in self._parents

    def moved_below(self, key: str) -> Iterator[tuple[str, Json]]:
        """Yield the leaves that were moved below ``key``, by their keys from there."""
        if key in self._parents:
            for name, node in self.moved.items():
                if name.startswith(f"{key}."):
                    yield name[len(key) + 1 :], node

    def _staying(self, items: _Items, path: str) -> Iterator[tuple[str | int, Json]]:
        """Yield the items without what has another name here, and put that aside."""
        for key, node in items:
            old = dotted(path, key)
            if inner := items_of(node):
                # A dict of which everything has another place is none any more.
                if staying := list(self._staying(inner, old)):
                    yield key, with_items(node, staying)
            else:
                new = renamed(old, self._rename)
                self._unused -= {pattern for pattern in self._unused if re.fullmatch(pattern, old)}
                if new == old:
                    yield key, node
                elif new in self.moved:
                    raise CheckpointError(f"two items of the checkpoint are called {new!r} here")
                else:
                    self.moved[new] = node

    def _check(self) -> None:
        staying = {leaf for key, node in self.tree.items() for leaf in leaves(node, key)}
        for key in sorted(staying & self.moved.keys()):
            raise CheckpointError(f"two items of the checkpoint are called {key!r} here")

    def _idle_only(self, only: Iterable[str]) -> list[str]:
        keys: set[str] = set(self.moved) | self._parents
        for key, node in self.tree.items() if only else ():
            for leaf in leaves(node, key):
                keys.update(_with_parents(leaf))
        return [
            f"only {pattern!r} matches nothing"
            for pattern in only
            if not any(re.fullmatch(pattern, key) for key in keys)
        ]


def _with_parents(key: str) -> Iterator[str]:
    yield key
    for position, character in enumerate(key):
        if character == ".":
            yield key[:position]
