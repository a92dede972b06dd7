"""Which dim of what they are called with ranks have parts of, where modules have whole parameters.

A norm of every head's queries has one scale for all heads, whose gradient is a sum over them. Its
chunks are along the dim of heads, and a forward on named axes shows which one that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import generalize, matching
from vescale_parallel._model.inputs import example_of, small_example
from vescale_parallel._tensor_parallel.chunks import Parts, parts_of
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._trace.axes import Axes, Dim, Trace, Value, infer_axes, is_within
from vescale_parallel._trace.fake_tensors import ObservationError


def chunk_marks(model: nn.Module, batch: Any, sharding: TensorSharding) -> dict[str, str]:
    """Return the ``<chunks>`` of modules with whole parameters that meet heads or features.

    Those for which no dim is found are left out, as are those that meet tokens.
    """
    owners = {fqn.rpartition(".")[0] for fqn in sharding.spec.grads}
    owners = {fqn for fqn in owners if f"{fqn}.weight" not in sharding.placements}
    batch = example_of(model) if batch is None else batch
    if not owners or batch is None:
        return {}
    try:
        trace = infer_axes(model, small_example(batch))
    except ObservationError:
        return {}  # forward needs values
    cut = _cut_atoms(trace, sharding)
    dims = {fqn: dim for fqn in owners if (dim := _dim_of(trace, cut, fqn)) is not None}
    return _patterns(model, dims)


def _cut_atoms(trace: Trace, sharding: TensorSharding) -> frozenset[int]:
    """Return the axes that sharded parameters are divided along."""
    found = frozenset[int]()
    for fqn, placement in sharding.placements.items():
        if isinstance(placement, Shard | InterleavedShard) and fqn in trace.parameters:
            dim = trace.parameters[fqn].dims[placement.dim]
            found |= _leading(trace.axes, dim, parts_of(placement))
    return found


def _leading(axes: Axes, dim: Dim, parts: Parts) -> frozenset[int]:
    """Return the major axis of each of the parts of a dim."""
    if isinstance(parts, tuple):
        return _leading_of_each(axes, dim)
    outer = 1
    for factor in axes.factors(dim):
        if outer == parts:
            return axes.atoms((factor,))
        segments = axes.segments(factor)
        if segments is not None and outer * len(segments) == parts:
            return frozenset[int]().union(*(_leading(axes, each.dim, 1) for each in segments))
        outer *= axes.sizes[factor]
    return frozenset()


def _leading_of_each(axes: Axes, dim: Dim) -> frozenset[int]:
    """Return the major axis of each of the parts of a dim that differ in length."""
    factors = axes.factors(dim)
    segments = next(filter(None, map(axes.segments, factors)), None)
    if segments is None:
        return axes.atoms(factors[:1])
    return frozenset[int]().union(*(_leading_of_each(axes, each.dim) for each in segments))


def _dim_of(trace: Trace, cut: frozenset[int], fqn: str) -> int | None:
    """Return the dim of what a module reads whose major axis is divided, if there is one."""
    found = {_divided(trace.axes, value, cut) for value in _read(trace, fqn)} - {()}
    if len(found) != 1:
        return None
    dims = found.pop()
    return dims[0] if len(dims) == 1 and dims[0] is not None else None


def _divided(axes: Axes, value: Value, cut: frozenset[int]) -> tuple[int | None, ...]:
    """Return the dims of a tensor that are divided, None where another axis is the major one."""
    return tuple(
        d if axes.atoms(axes.factors(dim)[:1]) & cut else None
        for d, dim in enumerate(value.dims)
        if axes.atoms(dim) & cut
    )


def _read(trace: Trace, fqn: str) -> Iterable[Value]:
    steps = [step for step in trace.steps if is_within(step.module, fqn)]
    made = {value.index for step in steps for value in step.outputs}
    return [
        value
        for step in steps
        for value in step.inputs
        if value.index not in made and value.parameter is None
    ]


def _patterns(model: nn.Module, dims: dict[str, int]) -> dict[str, str]:
    names = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    marks: dict[str, str] = {}
    for fqn, dim in sorted(dims.items()):
        pattern = generalize(fqn)
        alike = all(dims.get(each) == dim for each in matching(pattern, names))
        marks[f"{pattern if alike else fqn}.<chunks>"] = f"Shard({dim})"
    return marks
