"""Which dims of the random numbers that a model draws are cut, found by running it on fakes.

A dim that is twice as long for twice the batch is along the batch. One that is shorter on one of
several tensor-parallel ranks is cut over these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from ._draws import Cut, Scope, common, mark
from ._example import small_example
from ._fakes import ObservationError, bind
from ._memory_order import NotedOrder
from ._noted_draws import NotedDraw
from ._rehearsal import RehearsalError, opened, placement_between, rehearse_draws
from ._sharding_plan import Resolved, generalize, generalize_first, matching, resolve
from ._structure import block_stacks
from ._tensor_parallel import complete_placements
from ._torch_private import pytree

# The FQN of a module, and the number of the draw within a call of it.
Draw = tuple[str, int]
Given = tuple[tuple[Any, ...], dict[str, Any]]

_NOTHING_IS_CUT = resolve({}, nn.Module())


@dataclass(frozen=True)
class TensorParallelism:
    """What a sharding plan makes of a model.

    Attributes:
        resolved: The plan; what it says of draws goes before what is found.
        placements: Of every cut parameter.
        size: Ranks.
    """

    resolved: Resolved
    placements: dict[str, Placement]
    size: int


def cuts_of_example(
    model: nn.Module, batch: Any, parallelism: TensorParallelism
) -> Mapping[Draw, Cut | None] | None:
    """Return how what a model draws in training is cut, None if an example does not show it.

    Args:
        model: Whole.
        batch: An example; None if there is none.
        parallelism: What tensor-parallel ranks compute.
    """
    if batch is None:
        return None
    batch = small_example(batch)
    doubled = _doubled(batch)
    try:
        once = bind(model, opened(batch))
        if doubled is None:
            draws = rehearse_draws(model, once, _NOTHING_IS_CUT, {}, 1, training=True)
            return None if draws else {}
        twice = bind(model, opened(doubled))
        noted = drawn_by_shape(model, once, twice, parallelism, training=True)
    except (RehearsalError, ObservationError):
        return None
    return noted.cuts(parallelism)


@dataclass(frozen=True)
class Noted:
    """The draws of a model, of some rows, of twice as many, and of a tensor-parallel rank."""

    once: Sequence[NotedDraw]
    twice: Sequence[NotedDraw]
    part: Sequence[NotedDraw]

    def cuts(self, parallelism: TensorParallelism) -> dict[Draw, Cut | None]:
        """Return which dims are cut by (module FQN, number of the draw within a call).

        None if calls differ, or it could not be told.
        """
        cuts: dict[Draw, Cut | None] = {}
        for key, found in _compared(self.once, self.twice, self.part, parallelism.size).items():
            said = parallelism.resolved.draws.get(key)
            if said is not None:
                seen = Cut(rows=0) if found is None else found
                found = Cut(rows=seen.rows, part=said.dim, order=seen.order)
            cuts[key] = found
        return cuts

    def is_folded(self, draw: Draw, cut: Cut | None, num_rows: int) -> bool:
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
    parallelism: TensorParallelism,
    *,
    training: bool = False,
) -> Noted:
    """Return what a model draws, seen without memory.

    Args:
        model: Whole.
        once: Positional and keyword arguments.
        twice: The same with every row twice.
        parallelism: What tensor-parallel ranks compute.
        training: Whether to run all of it in training mode.

    Raises:
        RehearsalError: If its forward needs values.
        ObservationError: If it cannot be copied.
    """
    few = rehearse_draws(model, once, _NOTHING_IS_CUT, {}, 1, training=training)
    if not few:
        return Noted((), (), ())
    many = rehearse_draws(model, twice, _NOTHING_IS_CUT, {}, 1, training=training)
    part = few
    if parallelism.size > 1:
        resolved, placements = parallelism.resolved, parallelism.placements
        size = parallelism.size
        part = rehearse_draws(model, once, resolved, placements, size, training=training)
    return Noted(few, many, part)


def draw_marks(model: nn.Module, batch: Any, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Return the marks of draws that a plan cuts over tensor-parallel ranks."""
    resolved = resolve(plan, model)
    placements = complete_placements(resolved, model, size)
    found = cuts_of_example(model, batch, TensorParallelism(resolved, placements, size))
    cut: dict[tuple[int, int], set[str]] = {}
    for (fqn, index), each in (found or {}).items():
        if each is not None and each.part is not None:
            cut.setdefault((index, each.part), set()).add(fqn)
    names = [fqn for fqn, _ in model.named_modules()]
    marks: dict[str, str] = {}
    for (index, dim), fqns in cut.items():
        for fqn in sorted(fqns):
            patterns = (generalize(fqn), generalize_first(fqn), fqn)
            fitting = next(p for p in patterns if fqns.issuperset(matching(p, names)))
            marks[mark(fitting, index)] = f"Shard({dim})"
    return marks


def scopes_of(found: Mapping[Draw, Cut | None]) -> dict[str, Scope]:
    """Return the modules that draw, and what is known of it."""
    by_module: dict[str, list[Cut | None]] = {}
    for (fqn, _), cut in sorted(found.items(), key=lambda item: item[0]):
        by_module.setdefault(fqn, []).append(cut)
    return {
        fqn: Scope(
            cuts=cuts,
            parts={},
            is_region=any(cut is None or cut.part is not None for cut in cuts),
        )
        for fqn, cuts in by_module.items()
    }


def scopes_of_unknown(resolved: Resolved, model: nn.Module) -> dict[str, Scope]:
    """Watch the whole model, block by block since these may be run again on their own."""
    scopes = {"": Scope(parts={})}
    scopes |= {fqn: Scope(parts={}) for stack in block_stacks(model) for fqn in stack}
    if not resolved.draws:
        holders = {_parent(_parent(fqn)) for fqn in _cut_layers(resolved, model)}
        below = {name for name, _ in model.named_modules() if _is_below(name, holders)}
        scopes |= {fqn: Scope(parts={}, is_region=True) for fqn in below}
    for (fqn, index), shard in resolved.draws.items():
        parts = scopes[fqn].parts if fqn in scopes else {}
        scopes[fqn] = Scope(parts={**parts, index: shard.dim})
    return scopes


def _cut_layers(resolved: Resolved, model: nn.Module) -> Iterable[str]:
    for fqn in resolved.parameters:
        owner = _parent(fqn)
        gathered = owner in resolved.outputs
        if not gathered and not isinstance(model.get_submodule(owner), nn.Embedding):
            yield fqn


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _is_below(fqn: str, holders: Iterable[str]) -> bool:
    return any(not holder or f"{fqn}.".startswith(f"{holder}.") for holder in holders)


def _compared(
    once: Sequence[NotedDraw], twice: Sequence[NotedDraw], part: Sequence[NotedDraw], size: int
) -> dict[tuple[str, int], Cut | None]:
    doubled = {(d.fqn, d.call, d.index): d for d in twice}
    parts = {(d.fqn, d.call, d.index): d for d in part}
    cuts: dict[tuple[str, int], Cut | None] = {}
    for draw in once:
        where = (draw.fqn, draw.call, draw.index)
        cut = None
        if where in doubled and where in parts:
            cut = _cut(draw, doubled[where], parts[where], size)
        key = (draw.fqn, draw.index)
        cuts[key] = common(cuts.setdefault(key, cut), cut)
    return cuts


def _cut(once: NotedDraw, twice: NotedDraw, part: NotedDraw, size: int) -> Cut | None:
    rows = placement_between(_shaped(twice.shape), _shaped(once.shape), 2)
    placement = placement_between(_shaped(once.shape), _shaped(part.shape), size)
    if rows is None or placement is None:
        return None
    return Cut(
        rows=rows.dim if isinstance(rows, Shard) else None,
        part=placement.dim if isinstance(placement, Shard) else None,
        order=NotedOrder(once.order, part.order),
    )


def _shaped(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, device="meta")


def _doubled(batch: Any) -> Any:
    """Return a batch with every row twice, None if it cannot be told what the rows are."""
    leaves = pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if len({tensor.shape[0] for tensor in tensors}) != 1:
        return None

    def twice(x: Tensor) -> Tensor:
        return torch.cat((x, x)) if x.dim() else x

    return pytree.tree_map_only(Tensor, twice, batch)
