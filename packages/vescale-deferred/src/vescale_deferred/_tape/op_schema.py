"""What does an operator do to its arguments? Read off its schema, once per operator.

Running statistics are written by operators whose schemas do not say so: a table says it for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from vescale_deferred._torch_private import OpOverload, schema


def aten(names: str) -> frozenset[str]:
    """Return the names of operators, given with spaces in between."""
    return frozenset(f"aten::{name}" for name in names.split())


# Take only the geometry of their first argument.
GEOMETRY_ONLY = aten(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_empty_strided new_zeros new_ones new_full"
)
# Fill their first argument, whatever was in it.
_FILLS = aten("uniform_ normal_ random_ exponential_ cauchy_ geometric_ log_normal_ zero_ fill_")
_OVERWRITING = _FILLS | aten("bernoulli_ copy_")
# Write to arguments that their schemas call read-only: kernels that keep running statistics. What
# torch knows of this itself (torch/csrc/utils/schema_info.cpp) lacks some of them.
_UNDECLARED = dict.fromkeys(
    aten(
        "native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats "
        "batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm instance_norm "
        "_batch_norm_impl_index"
    ),
    ("running_mean", "running_var"),
)


@dataclass(frozen=True, slots=True)
class OpSchema:
    """What the schema of an operator says, and what it conceals.

    Attributes:
        name: Such as ``aten::add_``.
        mutated: The arguments it writes to, as (position, name).
        overwrites: Whether what it writes does not depend on what was there.
        is_fill: Whether it overwrites its first argument and returns it.
        is_random: Whether it draws from a generator.
        has_generator: Whether that generator can be passed.
        has_device: Whether it takes a device for its output.
        changes_geometry: Whether it makes an argument another view of its storage.
        is_view: Whether it returns other views of its arguments.
    """

    name: str
    mutated: tuple[tuple[int, str], ...]
    overwrites: bool
    is_fill: bool
    is_random: bool
    has_generator: bool
    has_device: bool
    changes_geometry: bool
    is_view: bool


@lru_cache(maxsize=4096)
def op_schema(func: OpOverload) -> OpSchema:
    """Return what the schema of ``func`` says."""
    found = schema(func)
    arguments = found.arguments
    undeclared = _UNDECLARED.get(found.name, ())
    written = [
        (position, argument)
        for position, argument in enumerate(arguments)
        if argument.name in undeclared
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    names = {argument.name for argument in arguments}
    return OpSchema(
        name=found.name,
        mutated=tuple((position, argument.name) for position, argument in written),
        overwrites=all(argument.is_out for _, argument in written) or found.name in _OVERWRITING,
        is_fill=found.name in _FILLS,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        has_generator="generator" in names,
        has_device="device" in names,
        is_view=any(r.alias_info is not None and not r.alias_info.is_write for r in found.returns),
        changes_geometry=torch.Tag.inplace_view in func.tags,
    )
