"""The ways in which regions may begin and end where the sequence is sharded between them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from vescale_parallel._model.fqns import generalize_first
from vescale_parallel._trace.dry_run import ModuleCall

from .candidate import Group, Kept
from .region_options import entrances, holder_of, is_linear


def around_whole_layers(
    model: nn.Module, stacks: Sequence[Sequence[str]], kept: Kept
) -> dict[str, str]:
    """Return marks that gather the sequence for layers that are not sharded.

    Attention that stays whole, for example: every rank computes it for all positions.
    """
    cut = {pattern for group, _ in kept for pattern in group.parameters}
    marks: dict[str, str] = {}
    for block in (fqn for stack in stacks for fqn in stack):
        for name, child in model.get_submodule(block).named_children():
            pattern = generalize_first(f"{block}.{name}")
            is_cut = any(each.startswith(f"{pattern}.") for each in cut)
            if not is_cut and any(p.dim() > 1 for p in child.parameters()):
                marks[f"{pattern}.<in>"] = "Shard(1) -> Replicate()"
                marks[f"{pattern}.<out>"] = "Replicate() -> Shard(1)"
    return marks


def summed_arguments(
    model: nn.Module, stacks: Sequence[Sequence[str]], calls: Mapping[str, ModuleCall]
) -> dict[str, str]:
    """Return marks that sum the gradients of what blocks get whole beside the sequence.

    Shifts, scales and gates that are made of a time step, as diffusion transformers have them:
    each rank applies them to its own positions. What attention reads enters there.
    """
    marks: dict[str, str] = {}
    for block in (fqn for stack in stacks for fqn in stack if fqn in calls):
        names = list(inspect.signature(model.get_submodule(block).forward).parameters)
        call = calls[block]
        given = [*zip(names, call.args, strict=False), *call.kwargs.items()]
        floats = [n for n, x in given if isinstance(x, Tensor) and x.is_floating_point()]
        for name in floats[1:]:
            if name in names and not (name.endswith("states") or name in ("key", "value")):
                marks[f"{generalize_first(block)}.<enter:{name}>"] = "Replicate()"
    return marks


def names_below(model: nn.Module, fqn: str) -> list[str]:
    module = model.get_submodule(fqn)
    return [f"{fqn}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]


def by_holder(model: nn.Module, kept: Kept) -> list[Kept]:
    """Put together the groups whose layers the same module holds, itself or in one of its own."""
    holders = {holder_of(model, group.entries) for group, _ in kept}
    found: dict[str, Kept] = {}
    for group, plan in kept:
        holder = holder_of(model, group.entries)
        around = [other for other in holders if other and f"{holder}.".startswith(f"{other}.")]
        found.setdefault(min(around, key=len, default=holder), []).append((group, plan))
    return list(found.values())


def sequence_borders(model: nn.Module, together: Kept) -> Iterator[dict[str, str]]:
    """Yield marks of groups that one module holds, likeliest first."""
    holders = [holder_of(model, group.entries) for group, _ in together]
    if len(together) > 1:
        # Routed experts beside shared ones, and in the first blocks an MLP in their place: what
        # holds them leaves for all.
        inner = _inner([plan for _, plan in together])
        exits = {
            p for group, plan in together for p in group.exits if f"{p}.<reenter>" not in plan
        }
        stay = {f"{p}.<leave>": "Partial()" for p in sorted(exits) if is_linear(model, p)}
        holder = min(holders, key=len)
        if len(stay) < len(exits):
            for entrance in entrances(model, holder, "Shard(1)"):
                yield inner | stay | entrance | {f"{holder}.<leave>": "Shard(1)"}
    each = [list(_group_borders(model, group, plan, holders)) for group, plan in together]
    for chosen in itertools.product(*each):
        yield {pattern: text for part in chosen for pattern, text in part.items()}


def _inner(plans: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return what plans say but for where regions begin and end."""
    ends = ("<enter", "<leave")
    return {
        pattern: text
        for plan in plans
        for pattern, text in plan.items()
        if not pattern.rpartition(".")[2].startswith(ends)
    }


def _group_borders(
    model: nn.Module, group: Group, plan: Mapping[str, str], holders: Collection[str]
) -> Iterator[dict[str, str]]:
    """Yield a group's marks: what enters its region is gathered, what leaves it is sharded."""
    inner = _inner([plan])
    # What enters the region again is summed, and stays whole.
    ends = [p for p in group.exits if f"{p}.<reenter>" not in plan]
    leaves = {f"{p}.<leave>": "Shard(1)" for p in ends}
    holder = holder_of(model, group.entries)
    if any(holder.startswith(f"{other}.") for other in holders if other):
        # Shared experts, inside of the region of all experts: that one leaves for both.
        yield inner | {f"{p}.<leave>": "Partial()" for p in ends}
    for entrance in entrances(model, holder, "Shard(1)"):
        yield inner | leaves | entrance
        # Where tokens lie flat inside, as in a mixture of experts, the holder leaves as a whole.
        if not any(is_linear(model, p) for p in ends):
            yield inner | entrance | {f"{holder}.<leave>": "Shard(1)"}
    yield inner | leaves | {f"{p}.<enter>": "Shard(1)" for p in group.entries}
    for last in _last_of_several(model, group, ends):
        within = {f"{p}.<reenter>": "Replicate()" for p in ends if p != last}
        for entrance in entrances(model, holder, "Shard(1)"):
            yield inner | within | {f"{last}.<leave>": "Shard(1)"} | entrance


def _last_of_several(model: nn.Module, group: Group, ends: Sequence[str]) -> Sequence[str]:
    """Return the layers any of which may be the only one whose sum leaves a region.

    Shards of the same region read the other sums: talking heads are mixed before the softmax and
    behind it.
    """
    several = len(ends) > 1 and len(group.entries) > 1
    return ends if several and all(is_linear(model, p) for p in ends) else ()
