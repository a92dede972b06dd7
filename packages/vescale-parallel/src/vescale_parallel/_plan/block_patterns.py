"""Values that a plan gives to blocks by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def by_block(name: str, said: Mapping[str, T], blocks: Sequence[str]) -> dict[str, T]:
    """Return the values of the blocks that patterns are of; ``*`` stands for one name component.

    Args:
        name: Of the plan's field, for errors.
        said: Pattern to value.
        blocks: FQNs of all blocks.

    Raises:
        ValueError: If a pattern is of no block, or two of different values are of one.

    Example:
        >>> by_block("recompute", {"layers.*": "full"}, ["layers.0", "layers.1"])
        {'layers.0': 'full', 'layers.1': 'full'}
    """
    found: dict[str, T] = {}
    for pattern, value in said.items():
        expression = re.escape(pattern).replace(r"\*", "[^.]+")
        matched = [block for block in blocks if re.fullmatch(expression, block)]
        if not matched:
            known = ", ".join(map(repr, blocks[:4])) or "none"
            raise ValueError(f"{name}: {pattern!r} is no block of the model; blocks are {known}")
        for block in matched:
            before = found.setdefault(block, value)
            if before != value:
                raise ValueError(
                    f"{name} says both {before} and {value} of {block!r}; leave one out"
                )
    return found
