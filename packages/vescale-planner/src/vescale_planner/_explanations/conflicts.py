"""Which constraints exclude each other, and what of them would have to give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vescale_planner._search.ranking import ScoredCandidate
from vescale_planner._search.search import Search

# Bounds that decide what a step is, not how it is run: they are never in a conflict.
_KEPT = ("batch.global_size", "precision.param", "precision.reduce")


@dataclass(frozen=True)
class Conflict:
    """Constraints without any of which there would be plans that fit.

    Attributes:
        keys: A smallest set: all of it together excludes every plan, no part of it does.
        changes: For each key, the best plan of the others, all other constraints obeyed; those
            are left out without which still nothing fits.
    """

    keys: tuple[str, ...]
    changes: Mapping[str, ScoredCandidate]


def conflict_of(search: Search, world_size: int) -> Conflict | None:
    """Return why the constraints of a search leave no plan that fits; None if it is not they.

    Nor is it they where a plan would fit that the runtime refuses: that has reasons of its own.
    Candidates are priced, not tried. Constraints are left out one after the other as long as
    nothing fits (deletion filter, Chinneck and Dravnieks 1991): what is left is irreducible.
    """
    given = search.constraints
    kept = {key: given[key] for key in _KEPT if key in given}
    if _best(search, kept, world_size) is None or _best(search, given, world_size) is not None:
        return None
    keys = [key for key in given if key not in _KEPT]
    for key in list(keys):
        fewer = [each for each in keys if each != key]
        if _best(search, kept | _of(given, fewer), world_size) is None:
            keys = fewer
    changes: dict[str, ScoredCandidate] = {}
    for key in keys:
        found = _best(search, _of(given, (each for each in given if each != key)), world_size)
        if found is not None:
            changes[key] = found
    return Conflict(tuple(keys), changes)


def _of(given: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: given[key] for key in keys}


def _best(
    search: Search, constraints: Mapping[str, Any], world_size: int
) -> ScoredCandidate | None:
    """Return the best plan under other constraints, None if nothing fits."""
    same = all(
        constraints.get(key) == search.constraints.get(key)
        for key in {*constraints, *search.constraints}
        if key.startswith("tensor_parallel.") and key != "tensor_parallel.size"
    )
    other = search.under(constraints, keeps_sharding=same)
    try:
        found = other.run(world_size)
    except ValueError:  # no sizes multiply to the world size
        return None
    return found.fits[0] if found.fits else None


def said(conflict: Conflict, constraints: Mapping[str, Any]) -> str:
    """Return a conflict as a sentence."""
    every = [f"{key} {constraints[key]!r}" for key in conflict.keys]
    if len(every) == 1:
        text = f"{every[0]} leaves no plan that fits"
    else:
        text = f"{' and '.join(every)} exclude each other: without one of them there are plans"
    near = [f"without {key}: {each.candidate}" for key, each in conflict.changes.items()]
    return "; ".join([text, *near])
