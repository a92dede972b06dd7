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

from ._draws import WHOLE, Cut, Scope, mark
from ._example import small_example
from ._fakes import ObservationError
from ._noted_draws import NotedDraw
from ._rehearsal import RehearsalError, placement_between, rehearse_draws
from ._sharding_plan import Resolved, generalize, generalize_first, matching, resolve
from ._structure import block_stacks
from ._tensor_parallel import complete_placements
from ._torch_private import pytree

_NOTHING_IS_CUT = resolve({}, nn.Module())


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """The draws of a model.

    Attributes:
        cuts: (module FQN, number of the draw within a call) to which dims are cut; None if
            calls differ, or it could not be told.
    """

    cuts: Mapping[tuple[str, int], Cut | None]


def foreseen(
    model: nn.Module, batch: Any, resolved: Resolved, placements: dict[str, Placement], size: int
) -> Foreseen | None:
    """Return what random numbers a model draws in training, None if it has to be run to tell.

    Args:
        model: Whole.
        batch: An example; None if there is none.
        resolved: The plan; what it says of draws goes before what is found.
        placements: Of every cut parameter.
        size: Tensor-parallel ranks.
    """
    if batch is None:
        return None
    batch = small_example(batch)
    doubled = _doubled(batch)
    try:
        once = rehearse_draws(model, batch, _NOTHING_IS_CUT, {}, 1)
        if not once:
            return Foreseen(cuts={})
        if doubled is None:
            return None
        twice = rehearse_draws(model, doubled, _NOTHING_IS_CUT, {}, 1)
        part = once
        if size > 1:
            part = rehearse_draws(model, batch, resolved, placements, size)
    except (RehearsalError, ObservationError):
        return None
    cuts: dict[tuple[str, int], Cut | None] = {}
    for key, found in _compared(once, twice, part, size).items():
        said = resolved.draws.get(key)
        if said is not None:
            found = Cut(rows=0 if found is None else found.rows, part=said.dim)
        cuts[key] = found
    return Foreseen(cuts=cuts)


def draw_marks(model: nn.Module, batch: Any, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Return the marks of draws that a plan cuts over tensor-parallel ranks."""
    resolved = resolve(plan, model)
    placements = complete_placements(resolved, model, size)
    found = foreseen(model, batch, resolved, placements, size)
    cut: dict[tuple[int, int], set[str]] = {}
    for (fqn, index), each in ({} if found is None else found.cuts).items():
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


def scopes_of(found: Foreseen | None, resolved: Resolved, model: nn.Module) -> dict[str, Scope]:
    """Return the modules that draw, or may draw, and what is known of it."""
    if found is None or not found.cuts:
        return _unforeseen(resolved, model)
    by_module: dict[str, list[Cut | None]] = {}
    for (fqn, _), cut in sorted(found.cuts.items(), key=lambda item: item[0]):
        by_module.setdefault(fqn, []).append(cut)
    return {
        fqn: Scope(
            cuts=cuts,
            parts={},
            is_region=any(cut is None or cut.part is not None for cut in cuts),
        )
        for fqn, cuts in by_module.items()
    }


def _unforeseen(resolved: Resolved, model: nn.Module) -> dict[str, Scope]:
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
            cut = _cut(draw.shape, doubled[where].shape, parts[where].shape, size)
        key = (draw.fqn, draw.index)
        cuts[key] = cut if cuts.setdefault(key, cut) == cut else None
    return cuts


def _cut(
    once: tuple[int, ...], twice: tuple[int, ...], part: tuple[int, ...], size: int
) -> Cut | None:
    rows = placement_between(_shaped(twice), _shaped(once), 2)
    placement = placement_between(_shaped(once), _shaped(part), size)
    if rows is None or placement is None:
        return None
    cut = Cut(
        rows=rows.dim if isinstance(rows, Shard) else None,
        part=placement.dim if isinstance(placement, Shard) else None,
    )
    return WHOLE if cut == WHOLE else cut


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
