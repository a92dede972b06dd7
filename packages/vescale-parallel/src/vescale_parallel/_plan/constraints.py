"""Dotted constraint keys: from a dict a person wrote to fields of a plan."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .plan import ParallelPlan, constraint_keys


def check_constraints(constraints: Mapping[str, Any]) -> None:
    """Raise if a key is no field of a plan or a value cannot be one.

    Raises:
        ValueError: Naming the unknown key and the nearest known ones, or the bad value.

    Example:
        >>> check_constraints({"tensor_parallel.sise": 2})
        Traceback (most recent call last):
        ...
        ValueError: unknown constraint 'tensor_parallel.sise'; did you mean ...
    """
    known = constraint_keys()
    for key in constraints:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3, cutoff=0.4) or sorted(known)
            raise ValueError(
                f"unknown constraint {key!r}; did you mean {' or '.join(map(repr, near))}?"
            )


def with_constraints(plan: ParallelPlan, constraints: Mapping[str, Any]) -> ParallelPlan:
    """Return ``plan`` with the constrained fields replaced.

    Args:
        plan: The plan to start from.
        constraints: Dotted key to value, for example ``{"tensor_parallel.size": 2}``.

    Raises:
        ValueError: If a key is unknown, a value is out of range, or values contradict.
    """
    check_constraints(constraints)
    sections: dict[str, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for key, value in constraints.items():
        path = constraint_keys()[key]
        if len(path) == 1:
            whole[path[0]] = value
        else:
            sections.setdefault(path[0], {})[path[1]] = value
    if "sharding_plan" in sections.get("tensor_parallel", {}):
        sections["tensor_parallel"].setdefault("sharding_policy", "manual")
    if "split_points" in sections.get("pipeline_parallel", {}):
        sections["pipeline_parallel"].setdefault("split_method", "manual")
    changed = {name: replace(getattr(plan, name), **values) for name, values in sections.items()}
    return replace(plan, **changed, **whole)
