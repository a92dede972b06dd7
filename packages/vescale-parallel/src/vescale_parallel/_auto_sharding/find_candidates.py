"""Find tensor-parallel candidates in any model, from the axes of one forward on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._trace.axes import Graph, RefusedError, Trace, Value, infer_axes

from .axis_search import Atoms, Search
from .candidate import Candidate as Candidate, Candidates as Candidates, Whole
from .experts import experts
from .features import features, gathered
from .vocabulary import vocabulary
from .whole_modules import are_in_one, called_whole


def find_candidates(
    model: nn.Module, batch: Any, size: int, *, trace: Trace | None = None
) -> Candidates:
    """Propose shardings of a model's parameters among ``size`` ranks.

    The model may be real, on the meta device, or deferred; it is not changed. A ``trace`` is what
    :func:`infer_axes` returned for it and the batch, to save the time.

    Raises:
        ObservationError: If the forward needs values that a fake tensor does not have.

    Example:
        >>> mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> import torch
        >>> [cut] = find_candidates(mlp, torch.zeros(2, 8), 4).chosen
        >>> cut.parameters
        {'1.weight': Shard(dim=0), '1.bias': Shard(dim=0), '3.weight': Shard(dim=1)}
        >>> cut.entries, cut.exits
        (('1',), ('3',))
    """
    search = Search(Graph(infer_axes(model, batch) if trace is None else trace), size)
    blocks = [fqn for stack in block_stacks(model) for fqn in stack]
    possible = [*_axis_cuts(search, blocks), *experts(search)]
    possible.sort(key=_worth, reverse=True)
    chosen: list[Candidate] = []
    others: list[Candidate] = []
    for cut in possible:
        (others if any(_conflict(cut, other) for other in chosen) else chosen).append(cut)
    return Candidates(
        chosen=tuple(chosen),
        alternatives=tuple(others),
        gathered=tuple(gathered(search, model, chosen)),
        rejected=tuple(dict.fromkeys(search.rejected)),
        unknown=tuple(dict.fromkeys(search.trace.unknown)),
    )


def _axis_cuts(search: Search, blocks: Collection[str]) -> Iterable[Candidate]:
    owners = search.owners()
    for atom, values in owners.items():
        try:
            yield _axis_cut(search, frozenset((atom,)), blocks)
        except RefusedError as refused:
            search.reject(atom, values, str(refused))
    tried: dict[Atoms, Candidate | None] = {}
    for atom in owners:
        for atoms in search.together(atom, owners):
            if len(atoms) > 1 and _joint_cut(search, atoms, blocks, tried) is not None:
                break
    yield from filter(None, tried.values())


def _joint_cut(
    search: Search, atoms: Atoms, blocks: Collection[str], tried: dict[Atoms, Candidate | None]
) -> Candidate | None:
    """Return the candidate along several axes, None if there is none; each is tried once."""
    if atoms not in tried:
        try:
            tried[atoms] = _axis_cut(search, atoms, blocks)
        except RefusedError:
            tried[atoms] = None
    return tried[atoms]


def _axis_cut(search: Search, atoms: Atoms, blocks: Collection[str]) -> Candidate:
    """Return the candidate along axes, gathered around norms over them in the same block.

    Raises:
        RefusedError: If they cannot be cut, with what was found first.
    """
    whole, first = dict[str, Whole](), None
    while True:
        having = search.owners()
        owners = list(dict.fromkeys(v for atom in sorted(atoms) for v in having.get(atom, [])))
        try:
            found = _along(search, atoms, owners)
        except RefusedError as refused:
            first = first or refused
            module = refused.needed_in
            names = [fqn for value in owners for fqn in search.names[value.index]]
            reduced = None
            if module and are_in_one([module, *names], blocks):
                reduced = called_whole(search, atoms, module)
            if module is None or reduced is None:
                raise first from None
            search, whole[module] = reduced
        else:
            return replace(found, whole=whole)


def _along(search: Search, atoms: Atoms, owners: list[Value]) -> Candidate:
    rows = vocabulary(search, next(iter(atoms)), owners) if len(atoms) == 1 else None
    return rows or features(search, atoms, owners)


def _worth(cut: Candidate) -> tuple[bool, int, float, int]:
    # Not counting what is gathered around norms: without that more would stay whole.
    per_byte = cut.flops / cut.communicated_bytes if cut.communicated_bytes else math.inf
    # Whole experts to each rank are for ranks of expert parallelism, which send tokens.
    # Nor what forward would have to read whole of what another candidate shards.
    return cut.kind != "experts", -cut.whole_numel, per_byte, cut.sharded_numel


def _conflict(one: Candidate, other: Candidate) -> bool:
    return bool(one.parameters.keys() & other.parameters.keys() or one.tensors & other.tensors)
