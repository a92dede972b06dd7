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
    if not isinstance(constraints, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]: user input
        raise TypeError(
            "expected constraints as a dict such as {'data_parallel.size': 2}, got "
            f"{type(constraints).__name__}"
        )
    known = constraint_keys()
    for key, value in constraints.items():
        if key not in known:
            raise ValueError(f"unknown constraint {key!r}; {_advice(key, value, known)}")


# What people who come from elsewhere may call a constraint, and what it is here.
_ELSEWHERE = {
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size"), "tensor_parallel.size"),
    **dict.fromkeys(("sp", "sequence_parallel"), "tensor_parallel.sequence"),
    **dict.fromkeys(("pp", "pp_size", "pipeline_parallel_size"), "pipeline_parallel.size"),
    **dict.fromkeys(("dp", "ddp", "dp_size", "data_parallel_size"), "data_parallel.size"),
    **dict.fromkeys(("zero", "zero_stage", "sharding_strategy"), "data_parallel.zero_stage"),
    **dict.fromkeys(("cp", "cp_size"), "context_parallel.size"),
    **dict.fromkeys(("ep", "ep_size"), "expert_parallel.size"),
    **dict.fromkeys(("batch_size", "global_batch_size", "train_batch_size"), "batch.global_size"),
    **dict.fromkeys(
        ("microbatches", "num_microbatches", "micro_batches"), "pipeline_parallel.microbatches"
    ),
    **dict.fromkeys(("schedule", "pp_schedule"), "pipeline_parallel.schedule"),
    **dict.fromkeys(("dtype", "precision", "mixed_precision", "param_dtype"), "precision.param"),
    **dict.fromkeys(
        ("activation_checkpointing", "gradient_checkpointing", "checkpointing"), "recompute"
    ),
    "seed": "batch.seed",
    "shuffle": "batch.shuffle",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "amp": "bfloat16", "fp32": "float32"}


def _advice(key: object, value: object, known: Mapping[str, object]) -> str:
    """Say what to write instead of a key that is none."""
    if not isinstance(key, str):
        return "keys are texts such as 'data_parallel.size'"
    if isinstance(value, Mapping) and any(each.startswith(f"{key}.") for each in known):
        inner = next(iter(value), "size")  # pyright: ignore[reportUnknownVariableType]: any
        return f"sections are written out: '{key}.{inner}': .."
    low = key.lower()
    if low in ("fsdp", "fsdp_size", "fully_sharded"):
        size = value if isinstance(value, int) and not isinstance(value, bool) else ".."
        return f"write 'data_parallel.size': {size}, 'data_parallel.zero_stage': 3"
    if low in _DTYPES:
        return f"write 'precision.param': {_DTYPES[low]!r}"
    if low in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[low]!r}?"
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.4)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known are {', '.join(sorted(known))}"


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
