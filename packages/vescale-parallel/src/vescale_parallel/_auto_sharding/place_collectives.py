"""Find where regions begin and end, and which integers count local things, by proving it.

Given are parameters that are cut together, the layers in which the cut axis appears and those
in which it is summed away. There are few ways to put the borders of a region around them; they
are tried, likeliest first, and the first one that :mod:`._proof` finds right is taken.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.fqns import generalize, generalize_first, matching
from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._trace.fake_tensors import bind
from vescale_parallel._verify.call_signature import CallForms, proof_record
from vescale_parallel._verify.dry_runs import DryRuns
from vescale_parallel._verify.equivalence import Proof, prove

# Combinations of borders that are tried for sequence parallelism.
_MAX_TRIES = 24


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are cut together, as patterns.

    Attributes:
        parameters: Parameter pattern to placement text.
        entries: Patterns of modules that read a whole activation and leave a cut one.
        exits: Patterns of modules that read a cut activation and leave partial values.
        shared: Patterns of linear layers that stay whole, each rank computing one of
            ``num_shared`` parts of their output: key-value heads, fewer than ranks.
        num_shared: Number of those parts; 0 if there are no such layers.
        ratio: Query heads that share a key-value head.
        moves: Marks that belong to the parameters: the logits of a head stay cut.
    """

    parameters: Mapping[str, str]
    entries: tuple[str, ...]
    exits: tuple[str, ...]
    shared: tuple[str, ...] = ()
    num_shared: int = 0
    ratio: int = 1
    moves: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def placed(self) -> dict[str, str]:
        """What a plan says of the parameters."""
        parts = {f"{p}.<part>": f"Shard(0) of {self.num_shared}" for p in self.shared}
        return {**self.parameters, **parts, **self.moves}


@dataclass(frozen=True, kw_only=True)
class ShardingProposal:
    """A sharding plan that was proven, and what was left whole for want of a proof.

    Attributes:
        plan: Pattern to text.
        left_whole: Parameters that were not cut, as patterns, and why.
        proven_call: The form of call that the plan was proven for; None without a proof.
    """

    plan: dict[str, str]
    left_whole: dict[str, str]
    proven_call: str | None = None

    def proven_calls(self, size: int) -> tuple[str, ...]:
        """Return what a plan for ``size`` ranks says in ``tensor_parallel.proven_calls``."""
        if self.proven_call is None:
            return ()
        return (proof_record(self.proven_call, size, self.plan),)


# Groups, each with its part of a plan.
Kept = list[tuple[Group, dict[str, str]]]


def place_collectives(
    runs: DryRuns, groups: Sequence[Group], size: int, *, sequence: bool
) -> ShardingProposal:
    """Return a proven sharding plan for as many of the groups as can be.

    Args:
        runs: Of the whole model, which is only run on fakes, its blocks on random numbers.
        groups: What to cut, each proven on its own and then together; of those that share
            parameters the first that is right.
        size: Tensor-parallel ranks.
        sequence: Candidate activations between regions along dim 1.

    Raises:
        ValueError: If ``sequence`` is asked for and no arrangement of it is right.
    """
    model, needs_values = runs.model, False
    try:
        runs.blocks()
    except DryRunError:
        if sequence:
            raise
        needs_values = True  # the model as one region is left
    subject = _Subject(runs, size, needs_values)
    kept, refused = _as_it_is(subject, groups), dict[str, str]()
    try:
        proof = subject.proof_of(_together(kept))
    except DryRunError:
        raise  # no other borders would help
    except ValueError:
        kept, refused = _one_by_one(subject, groups)
        proof = subject.proof_of(_together(kept)) if kept and not sequence else None
    if sequence:
        plan = _in_sequence(subject, kept)
    else:
        plan = _together(kept) | ({} if proof is None else _grad_marks(model, proof))
    form = CallForms(model).form(*bind(model, runs.batch))
    return ShardingProposal(plan=plan, left_whole=refused, proven_call=form)


def _together(kept: Kept) -> dict[str, str]:
    return {pattern: text for _, plan in kept for pattern, text in plan.items()}


def _as_it_is(subject: _Subject, groups: Sequence[Group]) -> Kept:
    """Return all groups with the likeliest borders."""
    kept: Kept = []
    for group in groups:
        if not _overlaps(group, kept):
            attributes = _attribute_options(subject.model, group, subject.size)[0]
            borders = next(_borders(subject.model, group))
            kept.append((group, {**group.placed, **attributes, **borders}))
    return kept


def _one_by_one(subject: _Subject, groups: Sequence[Group]) -> tuple[Kept, dict[str, str]]:
    """Return the groups that can be cut, each alone and then together, and why others cannot."""
    kept: Kept = []
    refused: dict[str, str] = {}
    together: dict[str, str] = {}
    for group in groups:
        if _overlaps(group, kept):
            continue  # cut in a better way already
        plan, why = _alone(subject, group)
        try:
            if plan is not None and together:
                subject.proof_of(together | plan)
        except ValueError as error:
            plan, why = None, str(error)
        if plan is None:
            refused[_shown(group)] = why
        else:
            kept.append((group, plan))
            together |= plan
    return kept, refused


def _overlaps(group: Group, kept: Kept) -> bool:
    return any(set(group.parameters) & set(other.parameters) for other, _ in kept)


def _shown(group: Group) -> str:
    return ", ".join(group.parameters)


@dataclass(frozen=True)
class _Subject:
    """The model that plans are proven on."""

    runs: DryRuns
    size: int
    needs_values: bool
    _proofs: dict[tuple[tuple[str, str], ...], Proof | str] = field(
        default_factory=dict["tuple[tuple[str, str], ...]", "Proof | str"]
    )

    @property
    def model(self) -> nn.Module:
        return self.runs.model

    def proof_of(self, plan: Mapping[str, str]) -> Proof:
        """Prove a plan, once; raise ValueError if it is wrong or was not compared in full."""
        key = tuple(plan.items())
        found = self._proofs.get(key)
        if isinstance(found, str):
            raise ValueError(found)
        if found is None:
            try:
                found = self._proofs[key] = self._prove(plan)
            except ValueError as error:
                if not isinstance(error, DryRunError):
                    self._proofs[key] = str(error)  # the error would keep what was compared
                raise
        return found

    def _prove(self, plan: Mapping[str, str]) -> Proof:
        sharding = shard(plan, self.model, self.size)
        proof = prove(self.runs, sharding, needs_values=self.needs_values)
        if proof.too_large:
            raise ValueError(f"{proof.too_large[0]} is too large to be run for a proof")
        for fqn, why in proof.unproven.items():
            raise ValueError(f"{fqn} was not compared with one device: {why}")
        return proof


def _alone(subject: _Subject, group: Group) -> tuple[dict[str, str] | None, str]:
    """Return the first right way to cut one group, or the reason why there is none."""
    why = ""
    for attributes in _attribute_options(subject.model, group, subject.size):
        for borders in _borders(subject.model, group):
            plan = {**group.placed, **attributes, **borders}
            try:
                subject.proof_of(plan)
            except ValueError as error:
                why = why or str(error)
                continue
            return plan, ""
    return None, why


def _grad_marks(model: nn.Module, proof: Proof) -> dict[str, str]:
    """Return the marks of parameters with partial gradients, patterns where they can be."""
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    marks: dict[str, str] = {}
    for fqn in sorted(proof.partial_grads):
        patterns = (generalize(fqn), generalize_first(fqn), fqn)
        fitting = (p for p in patterns if proof.partial_grads.issuperset(matching(p, names)))
        marks[f"{next(fitting)}.<grad>"] = "Partial()"
    return marks


def _borders(model: nn.Module, group: Group) -> Iterator[dict[str, str]]:
    """Yield the marks of a region's borders: around its layers, then around what holds them."""
    plain = [p for p in (*group.entries, *group.exits) if not _is_linear(model, p)]
    yield {
        **{f"{p}.<enter>": "Replicate()" for p in group.entries if p in plain},
        **{f"{p}.<leave>": "Replicate()" for p in group.exits if p in plain},
    }
    leaves = {f"{p}.<leave>": "Replicate()" for p in group.exits if p in plain}
    for entrance in _entrances(model, _holder(group.entries), "Replicate()"):
        yield entrance | leaves


def _is_linear(model: nn.Module, pattern: str) -> bool:
    modules = matching(pattern, [fqn for fqn, _ in model.named_modules()])
    return bool(modules) and linear_kind(model.get_submodule(modules[0])) is not None


def _holder(patterns: Sequence[str]) -> str:
    """Return the deepest module that holds all of some modules, empty if it is the block."""
    split = [pattern.split(".") for pattern in patterns]
    common = [parts[0] for parts in zip(*split, strict=False) if len(set(parts)) == 1]
    if len(patterns) == 1:
        common = common[:-1]
    return "" if not common or common[-1] == "*" else ".".join(common)


def _entrances(model: nn.Module, holder: str, arrives: str) -> Iterator[dict[str, str]]:
    """Yield the marks of what enters a module: the first activation, then others, too."""
    names = matching(holder, [fqn for fqn, _ in model.named_modules()]) if holder else []
    if not names:
        return
    first = {f"{holder}.<enter>": arrives}
    yield first
    arguments = list(inspect.signature(model.get_submodule(names[0]).forward).parameters)
    # What comes from outside the block is whole, whatever runs through the blocks.
    others = [n for n in arguments[1:] if n.endswith("states") or n in ("key", "value")]
    if others:
        yield first | {f"{holder}.<enter:{name}>": "Replicate()" for name in others}


def _attribute_options(model: nn.Module, group: Group, size: int) -> list[dict[str, str]]:
    """Return sets of integers that may have to be divided, fewest first."""
    holder = _holder((*group.entries, *group.exits))
    names = [fqn for fqn, _ in model.named_modules()]
    found = matching(holder, names) if holder else []
    if not found:
        return [{}]
    widths = _widths(model, group)
    heads: dict[str, str] = {}
    sizes: dict[str, str] = {}
    ratios: dict[str, str] = {}
    for fqn, module in model.get_submodule(found[0]).named_modules():
        if linear_kind(module) is not None:
            continue
        for name, value in vars(module).items():
            if type(value) is not int or value <= 0 or name.startswith("_"):
                continue
            mark = f"{holder}.{generalize(fqn)}".rstrip(".") + f".<attr:{name}>"
            if group.num_shared and value == group.ratio and "group" in name:
                ratios[mark] = f"Shard(0) of {size // group.num_shared}"
            elif value % size:
                continue
            elif value in widths:
                sizes[mark] = "Shard(0)"
            elif "head" in name and "dim" not in name and "size" not in name:
                heads[mark] = "Shard(0)"
    options = [{}, heads, sizes, {**heads, **sizes}]
    options = [{**ratios, **option} for option in options] + (options if ratios else [])
    return [option for index, option in enumerate(options) if option not in options[:index]]


def _widths(model: nn.Module, group: Group) -> set[int]:
    """Return the lengths that are cut."""
    found: set[int] = set()
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, text in group.parameters.items():
        digits = [int(part) for part in text.strip(")").partition("(")[2].split(",")]
        for fqn in matching(pattern, names)[:1]:
            length = model.get_parameter(fqn).shape[digits[0]]
            found |= {length, length // (digits[1] if len(digits) > 1 else 1)}
    return found


def _in_sequence(subject: _Subject, kept: Kept) -> dict[str, str]:
    """Return a plan whose blocks pass each other activations cut along the sequence."""
    model = subject.model
    stacks = [
        stack
        for stack in block_stacks(model)
        if any(matching(p, _names_below(model, stack[0])) for g, _ in kept for p in g.parameters)
    ]
    if not stacks:
        raise ValueError(
            "tensor_parallel.sequence needs a list of blocks whose layers are cut; none is"
        )
    base: dict[str, str] = {}
    for stack in stacks:
        base[f"{stack[0]}.<in>"] = "Replicate() -> Shard(1)"
        base[f"{stack[-1]}.<out>"] = "Shard(1) -> Replicate()"
    holders = {_holder(group.entries) for group, _ in kept}
    below = [name for stack in stacks for fqn in stack for name in _names_below(model, fqn)]
    options = [
        list(_sequence_borders(model, group, plan, holders))
        if any(matching(pattern, below) for pattern in group.placed if "<" not in pattern)
        else [plan]  # outside of blocks activations are whole
        for group, plan in kept
    ]
    why = ""
    for around in ({}, _around_whole_layers(model, stacks, kept)):
        for chosen in itertools.islice(itertools.product(*options), _MAX_TRIES):
            plan = base | around
            for part in chosen:
                plan |= part
            try:
                proof = subject.proof_of(plan)
            except ValueError as error:
                why = why or str(error)
                continue
            return plan | _grad_marks(model, proof)
    raise ValueError(
        "tensor_parallel.sequence: no way was found to cut activations between the blocks of "
        f"{type(model).__name__} along dim 1; leave it out ({why})"
    )


def _around_whole_layers(
    model: nn.Module, stacks: Sequence[Sequence[str]], kept: Kept
) -> dict[str, str]:
    """Return marks that gather the sequence for layers of which nothing is cut.

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


def _names_below(model: nn.Module, fqn: str) -> list[str]:
    module = model.get_submodule(fqn)
    return [f"{fqn}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]


def _sequence_borders(
    model: nn.Module, group: Group, plan: Mapping[str, str], holders: Collection[str]
) -> Iterator[dict[str, str]]:
    """Yield a group's marks: what enters its region is gathered, what leaves it is cut."""
    inner = {p: t for p, t in plan.items() if not p.endswith((".<enter>", ".<leave>"))}
    leaves = {f"{p}.<leave>": "Shard(1)" for p in group.exits}
    holder = _holder(group.entries)
    if any(holder.startswith(f"{other}.") for other in holders if other):
        # Shared experts, inside of the region of all experts: that one leaves for both.
        yield inner | {f"{p}.<leave>": "Partial()" for p in group.exits}
    for entrance in _entrances(model, holder, "Shard(1)"):
        yield inner | leaves | entrance
        # Where tokens lie flat inside, as in a mixture of experts, the holder leaves as a whole.
        if not any(_is_linear(model, p) for p in group.exits):
            yield inner | entrance | {f"{holder}.<leave>": "Shard(1)"}
    yield inner | leaves | {f"{p}.<enter>": "Shard(1)" for p in group.entries}
