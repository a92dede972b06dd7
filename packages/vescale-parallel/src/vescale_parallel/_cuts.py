"""Propose tensor-parallel cuts of any model, from the axes that one forward on fakes shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from ._axes import (
    Dim,
    Flow,
    Graph,
    Obstacle,
    RefusedError,
    Step,
    UnknownOperator,
    Value,
    follow,
    infer_axes,
    is_within,
)
from ._linear_kinds import linear_kind
from ._sharding_plan import generalize

Kind = Literal["features", "vocabulary", "experts"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One axis that a model's parameters may be cut along, in every parameter at once.

    Attributes:
        length: Elements along the axis: key-value heads, features, rows, experts.
        kind: ``"vocabulary"`` is an axis that is looked up, or that the model returns: the
            output of its ``entries`` is to be gathered. ``"experts"`` leaves everything but
            the experts' own parameters whole.
        parameters: Exact parameter FQN, tied names included, to placement text.
        entries: FQNs of modules that are called with whole activations whose gradients are
            addends: they are summed at the module's beginning.
        exits: FQNs of modules that return addends.
        replicated: FQNs of whole parameters whose gradients are addends.
        biases: FQNs of whole parameters that the exits add to addends: only one rank may.
        flops: Of the forward, of the operators that the axis is part of.
        communicated_bytes: Of the activations that are summed, or gathered, in the forward.
        sharded_numel: Elements of the parameters, tied ones once.
        tensors: Indices of the forward's tensors that the axis changes.
    """

    length: int
    kind: Kind
    parameters: Mapping[str, str]
    entries: tuple[str, ...]
    exits: tuple[str, ...]
    replicated: tuple[str, ...]
    biases: tuple[str, ...] = ()
    flops: int
    communicated_bytes: int
    sharded_numel: int
    tensors: frozenset[int] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """What :func:`cuts` found.

    Attributes:
        chosen: Cuts that may be made together, best flops per communicated byte first.
        alternatives: Cuts that are possible, but not together with the chosen ones.
        gathered: Linear layers in none of the chosen cuts: each may have its columns cut and
            its output gathered, which saves memory and flops and costs the gather. Their
            ``exits`` are empty.
        rejected: (parameter pattern and dimension, reason) of axes that cannot be cut.
        unknown: Operators without a rule, and where they ran; their axes are rejected.
    """

    chosen: tuple[Cut, ...]
    alternatives: tuple[Cut, ...]
    gathered: tuple[Cut, ...]
    rejected: tuple[tuple[str, str], ...]
    unknown: tuple[UnknownOperator, ...]


def cuts(model: nn.Module, batch: Any, size: int) -> Cuts:
    """Propose cuts of a model's parameters among ``size`` ranks.

    Args:
        model: May be real, on the meta device, or deferred; it is not changed.
        batch: As in :func:`vescale_parallel.observe`.
        size: Ranks along the tensor-parallel axis.

    Raises:
        ObservationError: If the forward needs values that a fake tensor does not have.
    """
    trace = infer_axes(model, batch)
    search = _Search(Graph(trace), size)
    possible = [*search.axes(), *search.experts()]
    possible.sort(key=_worth, reverse=True)
    chosen: list[Cut] = []
    others: list[Cut] = []
    for cut in possible:
        (others if any(_conflict(cut, other) for other in chosen) else chosen).append(cut)
    return Cuts(
        chosen=tuple(chosen),
        alternatives=tuple(others),
        gathered=tuple(search.gathered(model, chosen)),
        rejected=tuple(dict.fromkeys(search.rejected)),
        unknown=tuple(dict.fromkeys(trace.unknown)),
    )


def _worth(cut: Cut) -> tuple[float, bool, int]:
    per_byte = cut.flops / cut.communicated_bytes if cut.communicated_bytes else math.inf
    return per_byte, cut.kind != "experts", cut.sharded_numel


def _conflict(one: Cut, other: Cut) -> bool:
    return bool(one.parameters.keys() & other.parameters.keys() or one.tensors & other.tensors)


@dataclass(eq=False)
class _Search:
    graph: Graph
    size: int
    rejected: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __post_init__(self) -> None:
        self.trace = self.graph.trace
        self.names: dict[int, list[str]] = defaultdict(list)
        for fqn, value in self.trace.parameters.items():
            self.names[value.index].append(fqn)
        self.obstacles: dict[int, Obstacle] = {}
        for obstacle in self.trace.obstacles:
            for atom in self.trace.axes.atoms(obstacle.dim):
                self.obstacles.setdefault(atom, obstacle)
        self.returned = {value.index for value in self.trace.returned}

    # ------------------------------------------------------------------ features

    def axes(self) -> Iterable[Cut]:
        for atom, owners in self._owners().items():
            try:
                found = self._vocabulary(atom, owners) or self._features(atom, owners)
            except RefusedError as refused:
                self._reject(atom, owners, str(refused))
            else:
                yield found

    def _owners(self) -> dict[int, list[Value]]:
        """Return the atoms of matrices, and every parameter that has them."""
        atoms: dict[int, list[Value]] = defaultdict(list)
        for value in dict.fromkeys(self.trace.parameters.values()):
            for atom in self.trace.axes.atoms(axis for dim in value.dims for axis in dim):
                atoms[atom].append(value)
        return {
            atom: owners
            for atom, owners in atoms.items()
            if any(sum(map(bool, value.dims)) > 1 for value in owners)
        }

    def _features(self, atom: int, owners: list[Value]) -> Cut:
        obstacle = self.obstacles.get(atom)
        if obstacle is not None:
            where = f" in {obstacle.module!r}" if obstacle.module else ""
            raise RefusedError(f"{obstacle.why}{where}")
        self._check_length(atom)
        parameters = self._placements(atom, owners)
        flow = follow(self.graph, atom)
        if flow.cut & self.returned:
            raise RefusedError("is returned by the model")
        exits = set(flow.addends.values())
        if not exits:
            raise RefusedError("is never contracted with a parameter")
        return Cut(
            length=self.trace.axes.sizes[atom],
            kind="features",
            parameters=parameters,
            entries=tuple(sorted(flow.entries)),
            exits=tuple(sorted(exits)),
            replicated=self._tied(flow.replicated),
            biases=self._tied(flow.biases),
            flops=self._flops(atom, flow),
            communicated_bytes=self._leaving(flow),
            sharded_numel=sum(math.prod(value.shape) for value in owners),
            tensors=frozenset({*flow.cut, *flow.addends}),
        )

    def _tied(self, fqns: Iterable[str]) -> tuple[str, ...]:
        values = [self.trace.parameters[fqn].index for fqn in fqns]
        return tuple(sorted(name for index in values for name in self.names[index]))

    def _check_length(self, atom: int) -> None:
        length = self.trace.axes.sizes[atom]
        if length % self.size:
            raise RefusedError(f"its length {length} is not divisible by {self.size}")

    def _flops(self, atom: int, flow: Flow) -> int:
        indices = self.graph.steps(flow.cut) | self.graph.contracts[atom]
        return sum(self.trace.steps[index].flops for index in indices)

    def _leaving(self, flow: Flow) -> int:
        """Return the bytes of the addends that their modules return."""
        leaving = 0
        for index, module in flow.addends.items():
            readers = self.graph.readers[index]
            if not all(is_within(step.module, module) for step in readers) or not readers:
                leaving += self.trace.values[index].nbytes
        return leaving

    # ------------------------------------------------------------------ placements

    def _placements(self, atom: int, owners: list[Value]) -> dict[str, str]:
        placements: dict[str, str] = {}
        for value in owners:
            dims = [d for d, dim in enumerate(value.dims) if atom in self.trace.axes.atoms(dim)]
            if len(dims) > 1:
                raise RefusedError(f"is in {len(dims)} dimensions of {value.parameter}")
            parts = self._parts(atom, value.dims[dims[0]], value)
            text = f"Shard({dims[0]})" if parts == 1 else f"InterleavedShard({dims[0]}, {parts})"
            placements |= dict.fromkeys(self.names[value.index], text)
        return placements

    def _parts(self, atom: int, dim: Dim, value: Value) -> int:
        """Return of how many equal parts of a dimension an atom is the major axis."""
        axes = self.trace.axes
        factors = axes.factors(dim)
        having = [k for k, axis in enumerate(factors) if atom in axes.atoms((axis,))]
        if len(having) > 1:
            raise RefusedError(f"is twice in one dimension of {value.parameter}")
        outer = axes.length(factors[: having[0]])
        segments = axes.segments(factors[having[0]])
        if segments is None:
            return outer
        if len({segment.length for segment in segments}) > 1:
            lengths = ", ".join(str(segment.length) for segment in segments)
            raise RefusedError(
                f"is packed in segments of unequal length ({lengths}) of {value.parameter}"
            )
        if not all(atom in axes.atoms(segment.dim) for segment in segments):
            raise RefusedError(f"is in some segments only of {value.parameter}")
        parts = {self._parts(atom, segment.dim, value) for segment in segments}
        if len(parts) > 1:
            raise RefusedError(f"is packed differently in the segments of {value.parameter}")
        return outer * len(segments) * parts.pop()

    # ------------------------------------------------------------------ vocabulary

    def _vocabulary(self, atom: int, owners: list[Value]) -> Cut | None:
        """Return a cut of rows that are looked up, or that the model returns."""
        entries, looked_up = set[str](), list[Step]()
        matrices = {value.index for value in owners if len(value.shape) == 2}
        derived = {value.index for value in owners}
        flops = 0
        for index in sorted(self.graph.steps(derived)):
            step = self.trace.steps[index]
            if not any(value.index in derived for value in step.inputs):
                continue
            if not any(value.from_batch for value in step.outputs) and not step.looked_up:
                if step.linear != "first":
                    return None
                derived |= {value.index for value in step.outputs}
            elif step.looked_up and atom in self.trace.axes.atoms(step.looked_up):
                looked_up.append(step)
        exits = {step.module for step in looked_up}
        outputs = [value for step in looked_up for value in step.outputs]
        for step in self._uses(atom, derived):
            if step.flops and any(v.index in self.graph.carriers[atom] for v in step.outputs):
                entries.add(step.module)
                outputs += step.outputs
                flops += step.flops
            elif not step.looked_up and step.module not in entries:
                return None
        if not self._is_vocabulary(atom, owners, entries, exits, matrices):
            return None
        self._check_table(owners, entries, looked_up)
        self._check_entries(owners, entries, exits)
        self._check_length(atom)
        return Cut(
            length=self.trace.axes.sizes[atom],
            kind="vocabulary",
            parameters=self._placements(atom, owners),
            entries=tuple(sorted(entries)),
            exits=tuple(sorted(exits)),
            replicated=(),
            flops=flops,
            communicated_bytes=sum(value.nbytes for value in outputs),
            sharded_numel=sum(math.prod(value.shape) for value in owners),
            tensors=frozenset(value.index for value in outputs),
        )

    def _uses(self, atom: int, derived: set[int]) -> list[Step]:
        """Return the steps in which a parameter's atom meets an activation."""
        carriers = self.graph.carriers[atom] & derived
        indices = sorted({step.index for v in carriers for step in self.graph.readers[v]})
        steps = [self.trace.steps[index] for index in indices]
        return [s for s in steps if any(v.from_batch for v in s.outputs) or s.looked_up]

    def _is_vocabulary(
        self,
        atom: int,
        owners: list[Value],
        entries: set[str],
        exits: set[str],
        matrices: set[int],
    ) -> bool:
        if not matrices or len(entries) > 1:
            return False
        if exits:
            return True
        widths = [math.prod(v.shape) // self.trace.axes.sizes[atom] for v in owners]
        in_block = any(part.isdigit() for fqn in entries for part in fqn.split("."))
        obstacle = self.obstacles.get(atom)
        ends = bool(self.graph.carriers[atom] & self.returned) or (
            obstacle is not None and obstacle.why.startswith("log_softmax")
        )
        return (
            bool(entries) and ends and not in_block and (self.trace.axes.sizes[atom] > max(widths))
        )

    def _check_table(self, owners: list[Value], entries: set[str], looked_up: list[Step]) -> None:
        """Refuse tables that save less than what summing the looked up rows costs."""
        if entries:
            return
        if not any(value.from_batch for step in looked_up for value in step.inputs):
            raise RefusedError("is looked up by position, not by what is in the batch")
        if any(value.shape[0] < math.prod(value.shape[1:]) for value in owners):
            raise RefusedError("is a table with fewer rows than columns")

    def _check_entries(self, owners: list[Value], entries: set[str], exits: set[str]) -> None:
        own = {name.rpartition(".")[0] for value in owners for name in self.names[value.index]}
        for module in sorted((entries | exits) - own):
            raise RefusedError(f"is used by a function in {module!r}, not by a module of its own")

    # ------------------------------------------------------------------ experts

    def experts(self) -> Iterable[Cut]:
        """Return a cut for each module whose own parameters are stacked experts."""
        atoms = self._expert_atoms()
        for module in sorted({module for _, module in self.trace.experts}):
            owned = {
                value.index: value
                for fqn, value in self.trace.parameters.items()
                if fqn.rpartition(".")[0] == module
                and len(value.shape) > 1
                and set(self.trace.axes.factors(value.dims[0])) & atoms
            }
            stacked = list(owned.values())
            lengths = {value.shape[0] for value in stacked}
            if not any(len(value.shape) > 2 for value in stacked) or len(lengths) != 1:
                continue
            length = lengths.pop()
            if length % self.size:
                reason = f"its length {length} is not divisible by {self.size}"
                self.rejected.append((f"{generalize(module)} experts", reason))
                continue
            cut = self._experts_of(module, stacked, length)
            if cut is not None:
                yield cut

    def _expert_atoms(self) -> set[int]:
        return {
            factors[0]
            for dim, _ in self.trace.experts
            if len(factors := self.trace.axes.factors(dim)) == 1
        }

    def _experts_of(self, module: str, stacked: list[Value], length: int) -> Cut | None:
        """Return a cut, unless the module returns something for each expert."""
        steps = [step for step in self.trace.steps if is_within(step.module, module)]
        made = {value.index: value for step in steps for value in step.outputs}
        leaving = [
            value
            for index, value in made.items()
            if value.has_grad
            and any(not is_within(s.module, module) for s in self.graph.readers[index])
        ]
        if not self._are_summed(module, stacked, leaving):
            return None
        names = [name for value in stacked for name in self.names[value.index]]
        return Cut(
            length=length,
            kind="experts",
            parameters=dict.fromkeys(names, "Shard(0)"),
            entries=(module,),
            exits=(module,),
            replicated=(),
            flops=sum(step.flops for step in steps),
            communicated_bytes=sum(value.nbytes for value in leaving),
            sharded_numel=sum(math.prod(value.shape) for value in stacked),
            tensors=frozenset(made),
        )

    def _are_summed(self, module: str, stacked: list[Value], leaving: list[Value]) -> bool:
        """Whether what a module returns is a sum over its experts, as far as axes show."""
        axes = self.trace.axes
        atoms = axes.atoms(axis for value in stacked for axis in value.dims[0])
        if any(atoms & axes.atoms(a for dim in value.dims for a in dim) for value in leaving):
            return False
        carriers = {index for atom in atoms for index in self.graph.carriers[atom]}
        made = [v for v in self.trace.values if v.index in carriers and v.from_batch]
        summed = {index for atom in atoms for index in self.graph.contracts[atom]}
        return not any(value.has_grad for value in made) or any(
            step.operator == "sum" and is_within(step.module, module)
            for step in (self.trace.steps[index] for index in summed)
        )

    # ------------------------------------------------------------------ gathered

    def gathered(self, model: nn.Module, chosen: Iterable[Cut]) -> Iterable[Cut]:
        """Return a cut of the columns of each linear layer that no other cut is in."""
        taken = {name for cut in chosen for name in cut.parameters}
        for fqn, module in model.named_modules():
            kind = linear_kind(module)
            weight = self.trace.parameters.get(f"{fqn}.weight")
            if kind is None or weight is None or taken & set(self.names[weight.index]):
                continue
            length = weight.shape[kind.out_dim]
            if length % self.size:
                continue
            steps = [step for step in self.trace.steps if step.module == fqn and step.flops]
            outputs = [value for step in steps for value in step.outputs]
            parameters = dict.fromkeys(self.names[weight.index], f"Shard({kind.out_dim})")
            bias = self.trace.parameters.get(f"{fqn}.bias")
            if bias is not None:
                parameters |= dict.fromkeys(self.names[bias.index], "Shard(0)")
            taken.update(parameters)
            yield Cut(
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

    # ------------------------------------------------------------------ reasons

    def _reject(self, atom: int, owners: list[Value], reason: str) -> None:
        first = next(value for value in owners if sum(map(bool, value.dims)) > 1)
        dim = next(d for d, dim in enumerate(first.dims) if atom in self.trace.axes.atoms(dim))
        length = self.trace.axes.sizes[atom]
        pattern = generalize(first.parameter or "")
        self.rejected.append((f"{pattern} dim {dim} length {length}", reason))
