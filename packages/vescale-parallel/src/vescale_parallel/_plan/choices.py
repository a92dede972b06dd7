"""Checks of fields that every section of a plan has."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints


@functools.cache
def hints_of(section: type) -> Mapping[str, Any]:
    """Return what the fields of a section are annotated with, read once: plans are many."""
    return get_type_hints(section)


def check_choices(prefix: str, section: object) -> None:
    """Raise if a field annotated with a Literal or bool holds something else.

    Raises:
        ValueError: With the dotted name of the field and its choices.
    """
    for name, hint in hints_of(type(section)).items():
        value = getattr(section, name)
        options = [hint, *get_args(hint)]
        allowed = [
            v for t in options if get_args(t) and not isinstance(t, type) for v in _literals(t)
        ]
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"expected {prefix}{name} to be True or False, got {value!r}")
        optional = value is None and type(None) in options
        # What patterns are mapped to is the field's own to check.
        maps = isinstance(value, Mapping) and any(get_origin(t) is Mapping for t in options)
        if (
            allowed
            and not optional
            and not maps
            and (isinstance(value, bool) or value not in allowed)
        ):
            raise ValueError(f"expected {prefix}{name} to be one of {allowed}, got {value!r}")


def _literals(hint: object) -> tuple[object, ...]:
    return get_args(hint) if str(hint).startswith("typing.Literal") else ()


def check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"expected {name} to be a positive integer, got {size!r}")
