"""Mappings in a plan: they cannot be changed, and have a hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NoReturn, TypeVar, cast

T = TypeVar("T")


class FrozenMapping(dict[str, T], Generic[T]):
    """A dict that cannot be changed, and so can be hashed."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a plan cannot be changed; use dataclasses.replace or with_constraints")

    __setitem__ = __delitem__ = __ior__ = _refuse  # pyright: ignore[reportAssignmentType]: refused
    clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]: refused

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]: dict has none
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (dict(self),)


def checked_places(given: object) -> FrozenMapping[tuple[str, ...]]:
    """Return blocks behind which modules are called, as a plan keeps them."""
    name = "pipeline_parallel.called_behind"
    if not isinstance(given, Mapping):
        raise ValueError(
            f"expected {name} to be FQNs of modules with lists of blocks, got {given!r}"
        )
    places = cast("Mapping[object, object]", given)
    for fqn, blocks in places.items():
        if not isinstance(fqn, str) or not isinstance(blocks, list | tuple) or not blocks:
            raise ValueError(
                f"expected {name} to have for each module a list of the blocks behind which it is "
                f"called ('' before all blocks), got {blocks!r} for {fqn!r}"
            )
    return FrozenMapping({str(fqn): tuple(cast("list[str]", at)) for fqn, at in places.items()})
