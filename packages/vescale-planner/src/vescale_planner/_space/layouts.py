"""The sizes of axes that a number of ranks and the constraints allow or ask for; the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vescale_parallel import rule_of

ACCUMULATION = "batch.gradient_accumulation"
# About what a step of the largest published runs has.
_MOST_TOKENS = 2**24


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of the mesh axes; ``ep`` of the ranks of ``dp`` and ``cp`` share experts."""

    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        sizes = {
            "data": self.dp,
            "context": self.cp,
            "tensor": self.tp,
            "pipeline": self.pp,
        }
        used = [f"{name} parallel {size}" for name, size in sizes.items() if size > 1]
        said = " x ".join(used) or "a single device"
        return f"{said}, expert parallel {self.ep}" if self.ep > 1 else said


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
    if fixed is not None:
        return [] if number % fixed else [fixed]
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return low + [number // size for size in reversed(low) if size * size != number]


def is_pipeline_asked_for(constraints: Mapping[str, Any]) -> bool:
    """Return whether only pipelines obey the constraints."""
    counts = ("size", "virtual_stages", "microbatches")
    given = [constraints.get(f"pipeline_parallel.{name}") or 1 for name in counts]
    points = constraints.get("pipeline_parallel.split_points")
    return max(given) > 1 or bool(points) or is_interleaving_asked_for(constraints)


def is_interleaving_asked_for(constraints: Mapping[str, Any]) -> bool:
    """Return whether only pipelines with several stages a rank obey the constraints."""
    virtual_stages = constraints.get("pipeline_parallel.virtual_stages") or 1
    schedule = constraints.get("pipeline_parallel.schedule")
    return virtual_stages > 1 or (schedule is not None and rule_of(schedule).virtual_stages[0] > 1)


def with_schedule(
    constraints: Mapping[str, Any], pp: int, *, returns_loss: bool
) -> Mapping[str, Any]:
    """Return constraints that say the schedule, where no other one can run.

    Of a model that was seen to return no loss all forward passes come before the first backward
    pass, as in GPipe: the loop computes the loss from what they return.
    """
    said = "pipeline_parallel.schedule" in constraints or is_interleaving_asked_for(constraints)
    if pp == 1 or returns_loss or said:
        return constraints
    return {**constraints, "pipeline_parallel.schedule": "gpipe"}


def stated_batch(
    world_size: int, constraints: Mapping[str, Any], example_rows: int | None, tokens: int
) -> int:
    """Return the global batch that all candidates are compared by where none is constrained.

    It is one example batch for each rank that may be data parallel, up to 16 million tokens.
    Without an example batch it is one row a rank, or four for each rank of a pipeline that was
    asked for.
    """
    get = constraints.get
    widest = max(layout.dp for layout in layouts(world_size, constraints))
    rows = example_rows
    if rows is None:
        ranks = get("pipeline_parallel.size") or world_size
        usual = 4 * ranks if is_pipeline_asked_for(constraints) else world_size // widest
        rows = (get("pipeline_parallel.microbatches") or usual) * (get(ACCUMULATION) or 1)
    most = max(1, _MOST_TOKENS // (rows * max(1, tokens)))
    return rows * max(size for size in divisors_of(widest, None) if size <= most)
