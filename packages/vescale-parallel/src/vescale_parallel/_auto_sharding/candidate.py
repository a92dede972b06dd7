"""A sharding candidate: one axis that parameters may be sharded along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch.distributed.tensor import Placement

from vescale_parallel._tensor_parallel.read_by_forward.arguments import ArgumentSlice
from vescale_parallel._tensor_parallel.sharding_spec import placements_text, texts_of
from vescale_parallel._trace.axes import Argument, UnknownOperator

Kind = Literal["features", "vocabulary", "experts"]


@dataclass(frozen=True)
class Whole:
    """What a module that is called with all of a sharded axis gets: a norm over it.

    Attributes:
        dim: That the axis is in, of what it gets and of what it returns.
        others: Position or name of arguments with the axis beside the first activation: gates.
    """

    dim: int
    others: tuple[int | str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One axis that a model's parameters may be sharded along, in every parameter at once.

    Or several, where parameters pack them: [Note: axes behind each other].

    Attributes:
        length: Elements along the axis: key-value heads, features, rows, experts. Of several
            axes their greatest common divisor.
        kind: ``"vocabulary"`` is an axis that is looked up, or that the model returns: the
            output of its ``entries`` is to be gathered. ``"experts"`` leaves everything but
            the experts' own parameters whole.
        parameters: Exact parameter FQN, tied names included, to placement.
        entries: FQNs of modules that are called with whole activations whose gradients are
            partial values: they are summed at the module's beginning.
        exits: FQNs of modules that return partial values.
        reentered: FQNs of those of them whose sum is read by what is sharded.
        replicated: FQNs of whole parameters whose gradients are partial values.
        biases: FQNs of whole parameters that the exits add to partial values: only one rank may.
        reads: (module FQN, name of a parameter below it) to a placement for each part of the
            parameter, of which some do not have the axis: forward reads these whole.
        slices: Arguments of modules, that have the axis and that every rank has whole, to which
            part of them a rank's forward gets.
        whole: Modules that are called with all of the axis, norms over it, and where it is: it is
            gathered around them.
        flops: Of the forward, of the operators that the axis is part of.
        communicated_bytes: Of the activations that are summed, or gathered, in the forward.
        sharded_numel: Elements of the parameters, tied ones once.
        whole_numel: Those of them that forward reads whole.
        tensors: Indices of the forward's tensors that the axis changes.
    """

    length: int
    kind: Kind
    parameters: Mapping[str, Placement]
    entries: tuple[str, ...]
    exits: tuple[str, ...]
    reentered: tuple[str, ...] = ()
    replicated: tuple[str, ...]
    biases: tuple[str, ...] = ()
    reads: Mapping[tuple[str, str], tuple[Placement, ...]] = field(
        default_factory=dict[tuple[str, str], tuple[Placement, ...]]
    )
    slices: Mapping[Argument, ArgumentSlice] = field(default_factory=dict[Argument, ArgumentSlice])
    whole: Mapping[str, Whole] = field(default_factory=dict[str, Whole])
    flops: int
    communicated_bytes: int
    sharded_numel: int
    whole_numel: int = 0
    tensors: frozenset[int] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What :func:`cuts` found.

    Attributes:
        chosen: Candidates that may be made together, best flops per communicated byte first.
        alternatives: Candidates that are possible, but not together with the chosen ones.
        gathered: Linear layers in none of the chosen cuts: each may have its columns cut and
            its output gathered, which saves memory and flops and costs the gather. Their
            ``exits`` are empty.
        rejected: (parameter pattern and dimension, reason) of axes that cannot be cut.
        unknown: Operators without a rule, and where they ran; their axes are rejected.
    """

    chosen: tuple[Candidate, ...]
    alternatives: tuple[Candidate, ...]
    gathered: tuple[Candidate, ...]
    rejected: tuple[tuple[str, str], ...]
    unknown: tuple[UnknownOperator, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are sharded together, as patterns.

    Attributes:
        parameters: Parameter pattern to placement.
        entries: Patterns of modules that read a whole activation and leave a cut one.
        exits: Patterns of modules that read a cut activation and leave partial values.
        shared: Patterns of linear layers that stay whole, each rank computing one of
            ``num_shared`` parts of their output: key-value heads, fewer than ranks.
        num_shared: Number of those parts; 0 if there are no such layers.
        ratio: Query heads that share a key-value head.
        reads: (module pattern, name of a parameter below it) to a placement for each part of the
            parameter, as forward reads it.
        slices: (module pattern, argument) to which part of it a rank's forward gets.
        moves: Marks that belong to the parameters: the logits of a head stay cut, a bias that is
            added to partial values is read as one, an axis is gathered around norms over it, a sum
            enters the region again.
    """

    parameters: Mapping[str, Placement]
    entries: tuple[str, ...]
    exits: tuple[str, ...]
    shared: tuple[str, ...] = ()
    num_shared: int = 0
    ratio: int = 1
    reads: Mapping[tuple[str, str], tuple[Placement, ...]] = field(
        default_factory=dict[tuple[str, str], tuple[Placement, ...]]
    )
    slices: Mapping[tuple[str, str], ArgumentSlice] = field(
        default_factory=dict[tuple[str, str], ArgumentSlice]
    )
    moves: Mapping[str, Placement] = field(default_factory=dict[str, Placement])

    @property
    def placed(self) -> dict[str, str]:
        """What a plan says of the parameters."""
        parts = {f"{p}.<part>": f"Shard(0) of {self.num_shared}" for p in self.shared}
        reads = {f"{p}.<read:{name}>": placements_text(r) for (p, name), r in self.reads.items()}
        slices = {f"{p}.<slice:{name}>": part.text for (p, name), part in self.slices.items()}
        return {**texts_of(self.parameters), **parts, **reads, **slices, **texts_of(self.moves)}


# Groups, each with its part of a plan.
Kept = list[tuple[Group, dict[str, str]]]
