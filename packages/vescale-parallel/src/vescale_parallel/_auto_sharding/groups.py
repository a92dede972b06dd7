"""Which parameters belong together: those of a sharding plan, or of candidates that were found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import generalize_first, matching
from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.attention_heads import parameters_by_heads, why_whole

from .candidate import Group
from .find_candidates import Candidate
from .region_options import is_linear


def groups_of(model: nn.Module, plan: Mapping[str, Placement]) -> list[Group]:
    """Sort a plan's sharded linear layers into column-then-row groups of siblings.

    Returns:
        The groups, embeddings and heads last.
    """
    names = [fqn for fqn, _ in model.named_modules()]
    moved = {pattern.rpartition(".")[0] for pattern in plan if pattern.endswith(("<in>", "<out>"))}
    members: dict[str, dict[str, Placement]] = {}
    rest: dict[str, Placement] = {}
    for pattern, placement in plan.items():
        owner = pattern.rpartition(".")[0]
        if "<" in pattern or not is_linear(model, owner) or owner in moved:
            rest[pattern] = placement
        else:
            members.setdefault(owner.rpartition(".")[0], {})[pattern] = placement
    groups: list[Group] = []
    for parameters in members.values():
        entries = tuple(p for p in parameters if _is_column(model, p, parameters[p], names))
        exits = tuple(p for p in parameters if p not in entries)
        groups.append(Group(parameters=parameters, entries=_owners(entries), exits=_owners(exits)))
    return [*groups, *_tables(model, rest)]


def _tables(model: nn.Module, rest: Mapping[str, Placement]) -> list[Group]:
    """Return embeddings and heads with their marks, those that are tied together.

    Other marks, of gradients and integers, are found anew where a plan is proven.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    by_identity: dict[frozenset[int], dict[str, Placement]] = {}
    for pattern, placement in rest.items():
        if "<" not in pattern:
            identities = frozenset(id(names[fqn]) for fqn in matching(pattern, names))
            by_identity.setdefault(identities, {})[pattern] = placement
    groups: list[Group] = []
    for parameters in by_identity.values():
        owners = _owners(tuple(parameters))
        marks = {p: t for p, t in rest.items() if p.endswith((".<in>", ".<out>"))}
        moves = {p: t for p, t in marks.items() if p.rpartition(".")[0] in owners}
        groups.append(Group(parameters=parameters, entries=(), exits=(), moves=moves))
    return groups


def _owners(patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pattern.rpartition(".")[0] for pattern in patterns))


def _is_column(model: nn.Module, pattern: str, placement: Placement, names: list[str]) -> bool:
    kind = linear_kind(model.get_submodule(matching(pattern.rpartition(".")[0], names)[0]))
    assert kind is not None
    return isinstance(placement, Shard | InterleavedShard) and placement.dim == kind.out_dim


def groups_of_cuts(model: nn.Module, cuts: Iterable[Candidate]) -> list[Group]:
    """Put the candidates of equal blocks together, best first, tables and heads last."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    tables: list[Group] = []
    for cut in cuts:
        if cut.kind == "features":
            group = _group_of(model, cut, generalize_first)
            key = (tuple(group.placed.items()), group.entries, group.exits)
            groups.setdefault(key, []).append(cut)
        elif cut.kind == "vocabulary":
            heads = [fqn for fqn in cut.entries if isinstance(model.get_submodule(fqn), nn.Linear)]
            moves = {f"{fqn}.<out>": Shard(-1) for fqn in heads}
            tables.append(Group(parameters=cut.parameters, entries=(), exits=(), moves=moves))
    return [group for alike in groups.values() for group in _of_alike(model, alike)] + tables


def _of_alike(model: nn.Module, cuts: Sequence[Candidate]) -> list[Group]:
    """Return one group, of patterns, if these match nothing else in the model; else one each."""
    general = _group_of(model, cuts[0], generalize_first)
    each = [_group_of(model, cut, str) for cut in cuts]
    parameters = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    modules = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    meant = {fqn for group in each for fqn in group.parameters}
    called = {fqn for group in each for fqn in (*group.entries, *group.exits)}
    fits = all(meant.issuperset(matching(p, parameters)) for p in general.parameters)
    fits &= all(
        called.issuperset(matching(p, modules)) for p in (*general.entries, *general.exits)
    )
    return [general] if fits else each


def _group_of(model: nn.Module, cut: Candidate, pattern_of: Callable[[str], str]) -> Group:
    return Group(
        parameters={pattern_of(fqn): placement for fqn, placement in cut.parameters.items()},
        entries=tuple(dict.fromkeys(map(pattern_of, cut.entries))),
        exits=tuple(dict.fromkeys(map(pattern_of, cut.exits))),
        reads={(pattern_of(fqn), name): parts for (fqn, name), parts in cut.reads.items()},
        slices={
            (pattern_of(fqn), _argument(model, fqn, at)): part
            for (fqn, at), part in cut.slices.items()
        },
        moves={
            **{f"{pattern_of(fqn)}.<read>": Partial() for fqn in _added_by_hand(model, cut)},
            **_gathered_around(model, cut, pattern_of),
            **{f"{pattern_of(fqn)}.<reenter>": Replicate() for fqn in cut.reentered},
        },
    )


def _gathered_around(
    model: nn.Module, cut: Candidate, pattern_of: Callable[[str], str]
) -> dict[str, Placement]:
    """Return the marks of the arguments of norms over a candidate's axis."""
    marks: dict[str, Placement] = {}
    for fqn, whole in cut.whole.items():
        named = [f":{_argument(model, fqn, at)}" for at in whole.others]
        for argument in ("", *named):
            marks[f"{pattern_of(fqn)}.<whole{argument}>"] = Shard(whole.dim)
    return marks


def _argument(model: nn.Module, fqn: str, at: int | str) -> str:
    """Return the name of an argument that a module is called with by its position or name."""
    arguments = list(inspect.signature(model.get_submodule(fqn).forward).parameters)
    return arguments[at] if isinstance(at, int) else at


def _added_by_hand(model: nn.Module, cut: Candidate) -> tuple[str, ...]:
    """Return a candidate's biases but those of row-wise linear layers, which add their own."""
    return tuple(
        fqn
        for fqn in cut.biases
        if f"{(owner := fqn.rpartition('.')[0])}.weight" not in cut.parameters
        or linear_kind(model.get_submodule(owner)) is None
    )


def attention_groups(model: nn.Module, size: int) -> tuple[list[Group], dict[str, str]]:
    """Return a group for each kind of torch's own attention layers, and why others stay whole."""
    found: dict[tuple[str, ...], Group] = {}
    whole: dict[str, str] = {}
    for fqn, module in model.named_modules():
        pattern = generalize_first(fqn)
        parameters = {
            f"{pattern}.{name}".strip("."): placement
            for name, placement in parameters_by_heads(module, size).items()
        }
        if parameters and fqn:
            group = Group(parameters=parameters, entries=(pattern,), exits=(pattern,))
            found.setdefault(tuple(parameters), group)
        elif isinstance(module, nn.MultiheadAttention):
            why = why_whole(module, size) or "the model is nothing else"
            whole[f"{pattern}.in_proj_weight".strip(".")] = why
    return list(found.values()), whole


def shared_groups(model: nn.Module, cuts: Sequence[Candidate], size: int) -> list[Group]:
    """Return groups whose key-value heads are fewer than the ranks, so that ranks share them.

    ``cuts`` are along axes whose length divides ``size``.
    """
    groups = [group for group in groups_of_cuts(model, cuts) if group.entries]
    lengths = {fqn: cut.length for cut in cuts for fqn in cut.parameters}
    # A group of equal blocks has patterns, one of a block that differs has names.
    lengths |= {generalize_first(fqn): length for fqn, length in lengths.items()}
    found: list[Group] = []
    for group in groups:
        num_shared = lengths[next(iter(group.parameters))]
        rows = {p: _cut_length(model, p, each) for p, each in group.parameters.items()}
        least = min(rows.values())
        few = {p.rpartition(".")[0] for p, length in rows.items() if length == least}
        ratio = max(rows.values()) // least
        linear = all(is_linear(model, p) for p in few)
        if linear and ratio % (size // num_shared) == 0 and few <= set(group.entries):
            found.append(
                Group(
                    parameters={
                        p: each
                        for p, each in group.parameters.items()
                        if p.rpartition(".")[0] not in few
                    },
                    entries=group.entries,
                    exits=group.exits,
                    shared=tuple(sorted(few)),
                    num_shared=num_shared,
                    ratio=ratio,
                )
            )
    return found


def _cut_length(model: nn.Module, pattern: str, placement: Placement) -> int:
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    dim = getattr(placement, "dim", 0)
    return model.get_parameter(matching(pattern, names)[0]).shape[dim]
