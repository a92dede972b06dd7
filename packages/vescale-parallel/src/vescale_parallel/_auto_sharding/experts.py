"""Candidates of stacked experts: whole experts to each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch.distributed.tensor import Shard

from vescale_parallel._model.fqns import generalize
from vescale_parallel._trace.axes import Value, is_within

from .axis_search import Search
from .candidate import Candidate


def experts(search: Search) -> Iterable[Candidate]:
    """Return a candidate for each module whose own parameters are stacked experts."""
    atoms = _expert_atoms(search)
    for module in sorted({module for _, module in search.trace.experts}):
        owned = {
            value.index: value
            for fqn, value in search.trace.parameters.items()
            if fqn.rpartition(".")[0] == module
            and len(value.shape) > 1
            and set(search.trace.axes.factors(value.dims[0])) & atoms
        }
        stacked = list(owned.values())
        lengths = {value.shape[0] for value in stacked}
        if not any(len(value.shape) > 2 for value in stacked) or len(lengths) != 1:
            continue
        length = lengths.pop()
        if length % search.size:
            reason = f"its length {length} is not divisible by {search.size}"
            search.rejected.append((f"{generalize(module)} experts", reason))
            continue
        cut = _experts_of(search, module, stacked, length)
        if cut is not None:
            yield cut


def _expert_atoms(search: Search) -> set[int]:
    return {
        factors[0]
        for dim, _ in search.trace.experts
        if len(factors := search.trace.axes.factors(dim)) == 1
    }


def _experts_of(
    search: Search, module: str, stacked: list[Value], length: int
) -> Candidate | None:
    """Return a candidate, unless the module returns something for each expert."""
    steps = [step for step in search.trace.steps if is_within(step.module, module)]
    made = {value.index: value for step in steps for value in step.outputs}
    leaving = [
        value
        for index, value in made.items()
        if value.has_grad
        and any(not is_within(s.module, module) for s in search.graph.readers[index])
    ]
    if not _are_summed(search, module, stacked, leaving):
        return None
    names = [name for value in stacked for name in search.names[value.index]]
    return Candidate(
        length=length,
        kind="experts",
        parameters=dict.fromkeys(names, Shard(0)),
        entries=(module,),
        exits=(module,),
        replicated=(),
        flops=sum(step.flops for step in steps),
        communicated_bytes=sum(value.nbytes for value in leaving),
        sharded_numel=sum(math.prod(value.shape) for value in stacked),
        tensors=frozenset(made),
    )


def _are_summed(search: Search, module: str, stacked: list[Value], leaving: list[Value]) -> bool:
    """Whether what a module returns is a sum over its experts, as far as axes show."""
    axes = search.trace.axes
    atoms = axes.atoms(axis for value in stacked for axis in value.dims[0])
    if any(atoms & axes.atoms(a for dim in value.dims for a in dim) for value in leaving):
        return False
    carriers = {index for atom in atoms for index in search.graph.carriers[atom]}
    made = [v for v in search.trace.values if v.index in carriers and v.from_batch]
    summed = {index for atom in atoms for index in search.graph.contracts[atom]}
    return not any(value.has_grad for value in made) or any(
        step.operator == "sum" and is_within(step.module, module)
        for step in (search.trace.steps[index] for index in summed)
    )
