"""Candidates of features and heads: from columns of some parameters to rows of others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.read_by_forward.arguments import ArgumentSlice
from vescale_parallel._trace.axes import Argument, Flow, RefusedError, Value, follow, is_within

from .axis_search import Atoms, Search
from .candidate import Candidate


def features(search: Search, atoms: Atoms, owners: list[Value]) -> Candidate:
    """Return the candidate along axes that parameters begin and end."""
    slices: dict[tuple[str, str], tuple[Placement, ...]] = {}
    arguments: dict[Argument, ArgumentSlice] = {}
    for obstacle in (each for atom in sorted(atoms) for each in search.obstacles.get(atom, ())):
        sliced = search.sliced(atoms, obstacle.buffer, owners) if obstacle.buffer else None
        if sliced is not None:
            slices |= sliced
            continue
        part = search.argument_slice(atoms, obstacle.argument) if obstacle.argument else None
        if part is not None and obstacle.argument is not None:
            arguments[obstacle.argument] = part
            continue
        where = f" in {obstacle.module!r}" if obstacle.module else ""
        raise RefusedError(f"{obstacle.why}{where}", needed_in=obstacle.module)
    length = math.gcd(*(search.axes.sizes[atom] for atom in atoms))
    search.check_length(length)
    parameters, reads = search.placements(atoms, owners)
    flow = follow(search.graph, atoms)
    if flow.cut & search.graph.returned:
        raise RefusedError("the model returns this dimension, and what it returns is whole")
    exits = set(flow.partial.values())
    if not exits:
        raise RefusedError(
            "no later layer reduces over this dimension, so the two could not be sharded as a pair"
        )
    return Candidate(
        length=length,
        kind="features",
        parameters=parameters,
        entries=tuple(sorted(flow.entries)),
        exits=tuple(sorted(exits)),
        reentered=tuple(sorted(flow.reentered)),
        replicated=search.tied(flow.replicated),
        biases=search.tied(flow.biases),
        reads={**reads, **slices},
        slices=arguments,
        flops=_flops(search, atoms, flow),
        communicated_bytes=_leaving(search, flow),
        sharded_numel=sum(math.prod(value.shape) for value in owners),
        whole_numel=sum(
            _numel_whole(search, parameters, name, each) for name, each in reads.items()
        ),
        tensors=frozenset({*flow.cut, *flow.partial}),
    )


def _numel_whole(
    search: Search,
    parameters: Mapping[str, Placement],
    name: tuple[str, str],
    read: Sequence[Placement],
) -> int:
    """Return how many elements of a parameter forward reads whole."""
    fqn = ".".join(name)
    value, placement = search.trace.parameters[fqn], parameters[fqn]
    assert isinstance(placement, InterleavedShard)
    length = value.shape[placement.dim]
    pairs = zip(placement.lengths(length), read, strict=True)
    whole = sum(part for part, each in pairs if each == Replicate())
    return math.prod(value.shape) // length * whole


def _flops(search: Search, atoms: Atoms, flow: Flow) -> int:
    indices = search.graph.steps(flow.cut)
    indices |= {index for atom in atoms for index in search.graph.contracts[atom]}
    return sum(search.trace.steps[index].flops for index in indices)


def _leaving(search: Search, flow: Flow) -> int:
    """Return the bytes of the partial values that their modules return."""
    leaving = 0
    for index, module in flow.partial.items():
        readers = search.graph.readers[index]
        if not all(is_within(step.module, module) for step in readers) or not readers:
            leaving += search.trace.values[index].nbytes
    return leaving


def gathered(search: Search, model: nn.Module, chosen: Iterable[Candidate]) -> Iterable[Candidate]:
    """Return a candidate, the columns, for each linear layer that no other candidate has."""
    taken = {name for cut in chosen for name in cut.parameters}
    for fqn, module in model.named_modules():
        kind = linear_kind(module)
        weight = search.trace.parameters.get(f"{fqn}.weight")
        if kind is None or weight is None or taken & set(search.names[weight.index]):
            continue
        length = weight.shape[kind.out_dim]
        if length % search.size:
            continue
        steps = [step for step in search.trace.steps if step.module == fqn and step.flops]
        outputs = [value for step in steps for value in step.outputs]
        parameters = dict.fromkeys(search.names[weight.index], Shard(kind.out_dim))
        bias = search.trace.parameters.get(f"{fqn}.bias")
        if bias is not None:
            parameters |= dict.fromkeys(search.names[bias.index], Shard(0))
        taken.update(parameters)
        yield Candidate(
            length=length,
            kind="features",
            parameters=parameters,
            entries=(fqn,),
            exits=(),
            replicated=(),
            flops=sum(step.flops for step in steps),
            communicated_bytes=sum(value.nbytes for value in outputs),
            sharded_numel=sum(math.prod(v.shape) for v in (weight, bias) if v is not None),
            tensors=frozenset(value.index for value in outputs),
        )
