"""The sizes of the mesh axes that a number of ranks and the constraints allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of the mesh axes."""

    tp: int
    pp: int
    dp: int
    cp: int = 1

    def __str__(self) -> str:
        sizes = {
            "data": self.dp,
            "context": self.cp,
            "tensor": self.tp,
            "pipeline": self.pp,
        }
        used = [f"{name} parallel {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(used) or "a single device"


def layouts(world_size: int, constraints: Mapping[str, Any]) -> tuple[Layout, ...]:
    """Return the sizes of the axes that multiply to the world size under the constraints.

    Raises:
        ValueError: If there are none, with the product and the nearest world sizes.
    """
    fixed = {name: constraints.get(f"{name}.size") for name in _AXES}
    cp = constraints.get("context_parallel.size") or 1
    fixed |= {"context_parallel": cp} if cp > 1 else {}
    ranks, rest = divmod(world_size, cp)
    found = tuple(
        Layout(tp, pp, ranks // (tp * pp), cp)
        for tp in divisors_of(ranks, fixed["tensor_parallel"])
        for pp in divisors_of(ranks // tp, fixed["pipeline_parallel"])
        if not rest and fixed["data_parallel"] in (None, ranks // (tp * pp))
    )
    if found:
        return found
    given = {name: size for name, size in fixed.items() if size is not None}
    product = math.prod(given.values())
    terms = " x ".join(f"{name}.size {size}" for name, size in given.items())
    if all(fixed[axis] is not None for axis in _AXES):
        raise ValueError(
            f"expected world size {product} ({terms}), got {world_size}; start {product} ranks "
            "or leave one of the sizes out"
        )
    below = world_size // product * product
    near = f"nearest are {below} and {below + product}" if below else f"nearest is {product}"
    raise ValueError(
        f"expected a world size that is a multiple of {product} ({terms}), got {world_size}; "
        f"the {near}"
    )


_AXES = ("tensor_parallel", "pipeline_parallel", "data_parallel")


def divisors_of(number: int, fixed: int | None) -> list[int]:
    """Return the divisors of a number, or what is fixed if it is one."""
    options = range(1, number + 1) if fixed is None else (fixed,)
    return [size for size in options if number % size == 0]
