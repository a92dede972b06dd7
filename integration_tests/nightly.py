"""Variants of a test of which a few run with every change, and all of them at night."""

from collections.abc import Iterable
from typing import Any

import pytest


def nightly_but(variants: Iterable[Any], *kept: Any) -> list[Any]:
    """Return what ``parametrize`` takes for all variants, marked ``nightly`` but for the kept.

    A tuple is a value for each of several names.
    """
    known = [*variants]
    assert all(each in known for each in kept), "no such variant"
    return [each if each in kept else _marked(each) for each in known]


def _marked(variant: Any) -> Any:
    return nightly(*variant) if isinstance(variant, tuple) else nightly(variant)


def nightly(*values: Any) -> Any:
    """Return one variant, a value for each name, that runs at night only."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def in_turns(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs of two kinds of variants, ``nightly`` but for one pair of each variant."""
    rows, columns = [*first], [*second]
    num_kept = max(len(rows), len(columns))
    kept = {(i % len(rows), i % len(columns)) for i in range(num_kept)}
    return [
        (row, column) if (i, j) in kept else nightly(row, column)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
