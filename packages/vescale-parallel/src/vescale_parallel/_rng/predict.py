"""Which dims of the random numbers that a model draws are cut, found by running it on fakes.

A dim that is twice as long for twice the batch is along the batch. One that is shorter on one of
several tensor-parallel ranks is cut over these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from vescale_parallel._model.blocks import blocks_of
from vescale_parallel._model.fqns import generalize, generalize_first, matching
from vescale_parallel._model.inputs import bind, has_rows_first, opened
from vescale_parallel._tensor_parallel.chunks import shard_of_parts
from vescale_parallel._tensor_parallel.shard_module import placement_between
from vescale_parallel._tensor_parallel.sharding_spec import ShardingSpec, placement_text
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding, shard
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._trace.fake_tensors import ObservationError
from vescale_parallel._trace.memory_order import NotedOrder
from vescale_parallel._trace.rng_trace import NotedDraw
from vescale_parallel._verify.dry_runs import DryRuns, dry_runs_of_few
from vescale_parallel._verify.rank_dry_run import draws_of_rank

from .known_draws import Scope, ShardedDraw, common, mark, part_of_draw

# The FQN of a module, and the number of the draw within a call of it.
Draw = tuple[str, int]
Given = tuple[tuple[Any, ...], dict[str, Any]]


def cuts_of_example(
    model: nn.Module, batch: Any, sharding: TensorSharding, runs: DryRuns | None = None
) -> Mapping[Draw, ShardedDraw | None] | None:
    """Return how what a model draws in training is cut, None if an example does not show it.

    What ``sharding`` says of draws goes before what is found; ``runs`` are of the model on the
    batch.
    """
    if batch is None:
        return None
    runs = dry_runs_of_few(model, batch) if runs is None else runs
    doubled = _doubled(runs.batch)
    try:
        few = runs.draws()
        if not few or doubled is None:
            return None if few else {}
        many = draws_of_rank(model, bind(model, opened(doubled)), training=True)
        noted = Noted(few, many, runs.draws(sharding))
    except (DryRunError, ObservationError):
        return None
    return noted.cuts(sharding)


@dataclass(frozen=True)
class Noted:
    """The draws of a model, of some rows, of these twice, and of a tensor-parallel rank.

    And in runs on as many rows in which other values may decide what is drawn.
    """

    once: Sequence[NotedDraw]
    twice: Sequence[NotedDraw]
    part: Sequence[NotedDraw]
    others: Sequence[Sequence[NotedDraw]] = ()

    def cuts(self, sharding: TensorSharding) -> dict[Draw, ShardedDraw | None]:
        """Return which dims are cut by (module FQN, number of the draw within a call).

        None if calls differ, or it could not be told.
        """
        cuts: dict[Draw, ShardedDraw | None] = {}
        for key, found in _compared(self.once, self.twice, self.part, sharding.size).items():
            said = sharding.spec.draws.get(key)
            if said is not None:
                seen = ShardedDraw(rows=0) if found is None else found
                found = replace(seen, **part_of_draw(said))
            elif found is not None and found.part is not None:
                found = _in_blocks(found, sharding, key[0])
            cuts[key] = found
        return cuts | dict.fromkeys(self._of_values(), ShardedDraw(of_values=True))

    def _of_values(self) -> set[Draw]:
        """Return the draws of modules whose draws are others where rows have other values."""
        runs = [{(d.fqn, d.call, d.index, d.shape) for d in x} for x in (self.twice, *self.others)]
        kinds = {generalize(fqn) for run in runs for fqn, *_ in run ^ runs[0]}
        drawn = [d for each in (self.once, self.twice, *self.others) for d in each]
        return {(d.fqn, d.index) for d in drawn if generalize(d.fqn) in kinds}

    def is_folded(self, draw: Draw, cut: ShardedDraw | None, num_rows: int) -> bool:
        """Whether rows share their dim with something else, of ``num_rows`` rows."""
        if cut is None or cut.rows is None:
            return False
        return any(
            each.shape[cut.rows] != num_rows
            for each in self.once
            if (each.fqn, each.index) == draw
        )


def drawn_by_shape(
    model: nn.Module,
    once: Given,
    twice: Given,
    sharding: TensorSharding,
) -> Noted:
    """Return what a model draws, seen on fake tensors."""
    few = draws_of_rank(model, once)
    if not few:
        return Noted((), (), ())
    many = draws_of_rank(model, twice)
    part = few
    if sharding.size > 1:
        part = draws_of_rank(model, once, sharding)
    return Noted(few, many, part)


def draw_marks(
    model: nn.Module,
    batch: Any,
    plan: Mapping[str, str],
    size: int,
    runs: DryRuns | None = None,
) -> dict[str, str]:
    """Return the marks of draws that a plan cuts over tensor-parallel ranks."""
    found = cuts_of_example(model, batch, shard(plan, model, size), runs)
    cut: dict[tuple[int, Placement], set[str]] = {}
    for (fqn, index), each in (found or {}).items():
        if each is not None and each.part is not None:
            placement = shard_of_parts(each.part, each.blocks)
            cut.setdefault((index, placement), set()).add(fqn)
    names = [fqn for fqn, _ in model.named_modules()]
    marks: dict[str, str] = {}
    for (index, placement), fqns in cut.items():
        for fqn in sorted(fqns):
            patterns = (generalize(fqn), generalize_first(fqn), fqn)
            fitting = next(p for p in patterns if fqns.issuperset(matching(p, names)))
            marks[mark(fitting, index)] = placement_text(placement)
    return marks


def scopes_of(found: Mapping[Draw, ShardedDraw | None]) -> dict[str, Scope]:
    """Return the modules that draw, and what is known of it."""
    by_module: dict[str, list[ShardedDraw | None]] = {}
    for (fqn, _), cut in sorted(found.items(), key=lambda item: item[0]):
        if cut is not None and cut.of_values:
            cut = None
        by_module.setdefault(fqn, []).append(cut)
    return {
        fqn: Scope(
            cuts=cuts,
            parts={},
            is_region=any(cut is None or cut.part is not None for cut in cuts),
        )
        for fqn, cuts in by_module.items()
    }


def scopes_apart(found: Mapping[Draw, ShardedDraw | None], model: nn.Module) -> dict[str, Scope]:
    """Return the modules in which values decide what is drawn, as ranks call them alike.

    That is what has a list of modules that draw so, and what calls another one, within its block.
    """
    blocks = [each for each in blocks_of(model) if not _is_beside_router(each, model)]
    names = set[str]()
    for (fqn, _), cut in found.items():
        if cut is None or not cut.of_values:
            continue
        block = max((b for b in blocks if f"{fqn}.".startswith(f"{b}.")), key=len, default="")
        inside = fqn.removeprefix(block).strip(".").split(".")
        paths = [".".join(filter(None, (block, *inside[:end]))) for end in range(len(inside))]
        held = (
            above
            for above, path in itertools.pairwise((*paths, fqn))
            if isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict)
        )
        names.add(next(held, paths[-1]))
    return {name: Scope(parts={}, is_apart=True) for name in names}


def _is_beside_router(block: str, model: nn.Module) -> bool:
    """Whether a block may be one of experts: beside its list is a parameter with a dim of each."""
    stack = _parent(block)
    held, owner = model.get_submodule(stack), model.get_submodule(_parent(stack))
    inside = {id(p) for p in held.parameters()}
    return any(len(held._modules) in p.shape for p in owner.parameters() if id(p) not in inside)


def scopes_of_unknown(spec: ShardingSpec, model: nn.Module) -> dict[str, Scope]:
    """Watch the whole model, block by block since these may be run again on their own."""
    scopes = {"": Scope(parts={})}
    scopes |= {fqn: Scope(parts={}) for fqn in blocks_of(model)}
    if not spec.draws:
        holders = {_parent(_parent(fqn)) for fqn in _cut_layers(spec, model)}
        below = {name for name, _ in model.named_modules() if _is_below(name, holders)}
        scopes |= {fqn: Scope(parts={}, is_region=True) for fqn in below}
    for (fqn, index), placement in spec.draws.items():
        parts = scopes[fqn].parts if fqn in scopes else {}
        scopes[fqn] = Scope(parts={**parts, index: placement})
    return scopes


def _cut_layers(spec: ShardingSpec, model: nn.Module) -> Iterable[str]:
    for fqn in spec.parameters:
        owner = _parent(fqn)
        gathered = owner in spec.outputs
        if not gathered and not isinstance(model.get_submodule(owner), nn.Embedding):
            yield fqn


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _is_below(fqn: str, holders: Iterable[str]) -> bool:
    return any(not holder or f"{fqn}.".startswith(f"{holder}.") for holder in holders)


def _compared(
    once: Sequence[NotedDraw], twice: Sequence[NotedDraw], part: Sequence[NotedDraw], size: int
) -> dict[tuple[str, int], ShardedDraw | None]:
    doubled = {(d.fqn, d.call, d.index): d for d in twice}
    parts = {(d.fqn, d.call, d.index): d for d in part}
    cuts: dict[tuple[str, int], ShardedDraw | None] = {}
    for draw in once:
        where = (draw.fqn, draw.call, draw.index)
        cut = None
        if where in doubled and where in parts:
            cut = _cut(draw, doubled[where], parts[where], size)
        key = (draw.fqn, draw.index)
        cuts[key] = common(cuts.setdefault(key, cut), cut)
    return cuts


def _cut(once: NotedDraw, twice: NotedDraw, part: NotedDraw, size: int) -> ShardedDraw | None:
    rows = placement_between(_shaped(twice.shape), _shaped(once.shape), 2)
    placement = placement_between(_shaped(once.shape), _shaped(part.shape), size)
    if rows is None or placement is None:
        return None
    return ShardedDraw(
        rows=rows.dim if isinstance(rows, Shard) else None,
        part=placement.dim if isinstance(placement, Shard) else None,
        order=NotedOrder(once.order, part.order),
    )


def _in_blocks(cut: ShardedDraw, sharding: TensorSharding, fqn: str) -> ShardedDraw | None:
    """Return a cut of what is drawn between the layers of a module, in their blocks.

    Query heads that share a key head which no rank has alone are dealt out group by group, so what
    is drawn for them is, too. It is told by the layer that they go into.
    """
    holders = fqn, _parent(fqn)
    found = next(
        (sharding.input_blocks[each] for each in holders if each in sharding.input_blocks), {1}
    )
    return replace(cut, blocks=next(iter(found))) if len(found) == 1 else None


def _shaped(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, device="meta")


def _doubled(batch: Any) -> Any:
    """Return a batch with every row twice, None if it cannot be told what the rows are."""
    if not has_rows_first(batch):
        return None

    def twice(x: Tensor) -> Tensor:
        return torch.cat((x, x)) if x.dim() else x

    return pytree.tree_map_only(Tensor, twice, batch)
