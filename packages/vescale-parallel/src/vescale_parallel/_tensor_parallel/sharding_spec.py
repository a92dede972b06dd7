"""The sharding plan of tensor parallelism: patterns and placements as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import matching, merged, renamed_owner

from .read_by_forward.arguments import ArgumentSlice, parse_slice

K = TypeVar("K")
_SHARD = re.compile(r"Shard\((-?\d+)\)")
_INTERLEAVED = re.compile(r"InterleavedShard\((\d+), ?(?:(\d+)|\((\d+(?:, ?\d+)+)\))\)")
_EITHER = r"(?:Shard\(\d+\)|Replicate\(\))"
_PLACEMENTS = re.compile(rf"\(({_EITHER}(?:, {_EITHER})+)\)")
# What a mark of parameters can say; its opposite is said by leaving it out.
_ONLY = {"grad": "Partial()", "read": "Partial()"}
_PARTS = re.compile(r"Shard\(0\)(?: of (?:(\d+)|([A-Za-z_][\w.]*)))?")
_MARK = re.compile(r"(.*?)\.?<([a-z]+)(?::([\w.]+))?>")
_MARKS = (
    "<in>, <out>, <enter>, <leave>, <reenter>, <grad>, <read>, <read:name>, <part>, <whole>,\n"
    "<whole:name>, <slice:name>, <chunks>, <attr:name>, <shape> or <random:k>"
)


def parse_placement(text: str) -> Placement:
    """Read a placement from its text.

    Raises:
        ValueError: With the texts that are understood.
    """
    if text == "Replicate()":
        return Replicate()
    if text == "Partial()":
        return Partial()
    if match := _SHARD.fullmatch(text):
        return Shard(int(match[1]))
    if match := _INTERLEAVED.fullmatch(text):
        lengths = match[3] or match[2]
        parts = tuple(map(int, lengths.split(",")))
        return InterleavedShard(int(match[1]), parts if match[3] else parts[0])
    raise ValueError(
        "expected 'Shard(d)', 'InterleavedShard(d, parts)', 'Replicate()' or 'Partial()', where "
        f"parts are a number of equal ones or (length, length, ...), got {text!r}"
    )


def placement_text(placement: Placement) -> str:
    """Return what :func:`parse_placement` reads."""
    match placement:
        case Shard():
            return f"Shard({placement.dim})"
        case InterleavedShard():
            return f"InterleavedShard({placement.dim}, {placement.parts})"
        case Partial():
            return "Partial()"
        case _:
            return "Replicate()"


def parse_placements(text: str) -> tuple[Placement, ...]:
    """Read one placement for each part: ``"(Shard(0), Replicate())"``.

    Or the one of all: ``"Shard(0)"``, ``"InterleavedShard(0, 3)"``.

    Raises:
        ValueError: If several are not ``"Shard(d)"`` of one dim and ``"Replicate()"``, both.
    """
    if _SHARD.fullmatch(text) or _INTERLEAVED.fullmatch(text):
        return (parse_placement(text),)
    match = _PLACEMENTS.fullmatch(text)
    placements = tuple(map(parse_placement, match[1].split(", "))) if match else ()
    dims = {shard_dim(each) for each in placements}
    if len(dims) != 2 or None not in dims:
        raise ValueError(
            "expected a placement for each part, '(Shard(0), Replicate())': 'Shard(d)' of one dim "
            f"for those that are read sharded, 'Replicate()' for those read whole, got {text!r}"
        )
    return placements


def placements_text(placements: Sequence[Placement]) -> str:
    """Return what :func:`parse_placements` reads."""
    texts = ", ".join(map(placement_text, placements))
    return f"({texts})" if len(placements) > 1 else texts


def texts_of(plan: Mapping[str, Placement]) -> dict[str, str]:
    """Return what is said of patterns as a sharding plan says it."""
    return {pattern: placement_text(placement) for pattern, placement in plan.items()}


@dataclass(frozen=True)
class PlacementChange:
    """How an activation is placed, and how it shall be. Equal ones: it stays so."""

    source: Placement
    target: Placement


def parse_change(text: str) -> PlacementChange:
    """Read ``"Replicate() -> Shard(1)"``.

    One placement stands for the move of a linear layer's last dim: ``"Replicate()"`` as an
    input that arrives whole or an output that is gathered, ``"Shard(-1)"`` as one that stays.
    """
    source, arrow, target = text.partition(" -> ")
    if arrow:
        return PlacementChange(parse_placement(source), parse_placement(target))
    return PlacementChange(Shard(-1), parse_placement(text))


@dataclass(frozen=True)
class ShardingSpec:
    """A sharding plan applied to one model: exact names instead of patterns.

    Attributes:
        parameters: Parameter FQN to placement.
        inputs: (module FQN, argument) to how the argument is moved; argument empty for the
            first activation.
        outputs: Module FQN to how what it returns is moved.
        entered: (module FQN, argument) of regions to how the argument arrives.
        left: Module FQN, whose outputs are partial values, to how their sum leaves.
        reentered: Module FQN, whose outputs' sum is read by what is sharded, so that its
            gradient is a partial value.
        grads: Parameter FQN to placement of its gradient.
        reads: Parameter FQN to placement of what forward reads of it: of partial values, its own
            on the first rank and zeros on the others.
        read_parts: (module FQN, name of a parameter below it) to a placement for each part of the
            parameter, as the module's forward reads it: those that are whole are all-gathered. Of
            a buffer, which is whole, it reads what is a rank's.
        whole: (module FQN, argument), of norms over a sharded dim, to how the argument is sharded:
            it is gathered before them, and what they return is sharded again. The argument is
            empty for the first activation.
        slices: (module FQN, argument) to which part of it a rank's forward gets.
        chunked: Module FQN, of whole parameters that are applied to sharded activations, to how
            what it is called with is sharded: chunks of numerics ``"invariant"`` are along it.
        shared: FQN of whole linear layers of whose output a rank computes a part, to the
            number of parts; neighbouring ranks compute the same one.
        attributes: (module FQN, attribute) of integers that count local things, to what they
            are divided by, None for the number of ranks; or to the name from there of a
            parameter, of which some parts are read whole: they are as long as what is read.
        shaped: FQN of modules whose code reads the shape of their first activation, which is
            whole, to the dim of which it is to read the length of a rank's shard.
        draws: (module FQN, number of the draw within a call) of random numbers to the dim
            that they are cut along.
    """

    parameters: Mapping[str, Placement]
    inputs: Mapping[tuple[str, str], PlacementChange]
    outputs: Mapping[str, PlacementChange]
    entered: Mapping[tuple[str, str], Placement]
    left: Mapping[str, Placement]
    reentered: Mapping[str, Placement]
    grads: Mapping[str, Placement]
    reads: Mapping[str, Placement]
    read_parts: Mapping[tuple[str, str], tuple[Placement, ...]]
    whole: Mapping[tuple[str, str], Shard]
    slices: Mapping[tuple[str, str], ArgumentSlice]
    chunked: Mapping[str, Shard]
    shared: Mapping[str, int]
    attributes: Mapping[tuple[str, str], int | str | None]
    shaped: Mapping[str, Shard]
    draws: Mapping[tuple[str, int], Shard | InterleavedShard]

    @property
    def read_whole(self) -> list[tuple[str, str]]:
        """Parameters and buffers of which modules read some parts whole, as in `read_parts`."""
        return [key for key, parts in self.read_parts.items() if Replicate() in parts]

    def renamed(self, names: Mapping[str, str]) -> ShardingSpec:
        """Return the same with modules of several names under one of them.

        Raises:
            ValueError: If the plan says different things of one module.
        """

        def module(fqn: str) -> str:
            return names.get(fqn, fqn)

        def pair(key: tuple[str, K]) -> tuple[str, K]:
            return module(key[0]), key[1]

        def parameter(fqn: str) -> str:
            return renamed_owner(fqn, names)

        if not names:
            return self
        return ShardingSpec(
            merged(self.parameters, parameter),
            merged(self.inputs, pair),
            merged(self.outputs, module),
            merged(self.entered, pair),
            merged(self.left, module),
            merged(self.reentered, module),
            merged(self.grads, parameter),
            merged(self.reads, parameter),
            merged(self.read_parts, pair),
            merged(self.whole, pair),
            merged(self.slices, pair),
            merged(self.chunked, module),
            merged(self.shared, module),
            merged(self.attributes, pair),
            merged(self.shaped, module),
            merged(self.draws, pair),
        )


def resolve(sharding_plan: Mapping[str, str], model: nn.Module) -> ShardingSpec:
    """Apply a sharding plan's patterns to the names of a model.

    Raises:
        ValueError: If a pattern matches nothing or a placement cannot be read.
    """
    parameters: dict[str, Placement] = {}
    inputs, outputs = dict[tuple[str, str], PlacementChange](), dict[str, PlacementChange]()
    entered: dict[tuple[str, str], Placement] = {}
    left, reentered = dict[str, Placement](), dict[str, Placement]()
    grads, reads = dict[str, Placement](), dict[str, Placement]()
    read_parts = dict[tuple[str, str], tuple[Placement, ...]]()
    whole, slices = dict[tuple[str, str], Shard](), dict[tuple[str, str], ArgumentSlice]()
    chunked, shaped = dict[str, Shard](), dict[str, Shard]()
    shared: dict[str, int] = {}
    attributes: dict[tuple[str, str], int | str | None] = {}
    draws: dict[tuple[str, int], Shard | InterleavedShard] = {}
    parameter_fqns = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    module_fqns = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    for pattern, text in sharding_plan.items():
        mark = _MARK.fullmatch(pattern)
        if mark is None:
            found = _matches(pattern, pattern, parameter_fqns)
            parameters |= dict.fromkeys(found, _parameter_placement(pattern, text))
            continue
        base, kind, name = mark[1], mark[2], mark[3] or ""
        of_parameters = kind in _ONLY and not name
        if of_parameters and text != _ONLY[kind]:
            raise _other_placement(pattern, kind, text)
        names = _matches(pattern, base, parameter_fqns if of_parameters else module_fqns)
        match kind:
            case "in":
                inputs |= {(fqn, name): parse_change(text) for fqn in names}
            case "out":
                outputs |= dict.fromkeys(names, parse_change(text))
            case "enter":
                entered |= {(fqn, name): parse_placement(text) for fqn in names}
            case "leave" | "reenter":
                target = left if kind == "leave" else reentered
                target |= dict.fromkeys(names, parse_placement(text))
            case "grad" | "read" if of_parameters:
                (grads if kind == "grad" else reads).update(dict.fromkeys(names, Partial()))
            case "read":
                having = _having(model, names, name)
                read_parts |= {(fqn, name): parse_placements(text) for fqn in having}
            case "whole":
                whole |= {(fqn, name): _argument_dim(pattern, text) for fqn in names}
            case "slice":
                slices |= {(fqn, name): parse_slice(pattern, text) for fqn in names}
            case "chunks" | "shape":
                target = chunked if kind == "chunks" else shaped
                target |= dict.fromkeys(names, _argument_dim(pattern, text))
            case "part":
                shared |= dict.fromkeys(names, _parts(pattern, text) or 1)
            case "attr":
                attributes |= {(fqn, name): _counted(pattern, text) for fqn in names}
            case "random":
                index, drawn = _parse_draw(pattern, name, text)
                draws |= {(fqn, index): drawn for fqn in names}
            case _:
                raise _no_such_mark(pattern, kind)
    return ShardingSpec(
        *(parameters, inputs, outputs, entered, left, reentered, grads, reads, read_parts, whole),
        *(slices, chunked, shared, attributes, shaped, draws),
    )


def _having(model: nn.Module, modules: list[str], name: str) -> list[str]:
    """Return the modules with a parameter or buffer below them; all of them if none has it."""
    # Blocks of other kinds have other parameters below modules of the same name.
    names = {fqn for fqn, _ in model.named_parameters(remove_duplicate=False)}
    names |= {fqn for fqn, _ in model.named_buffers(remove_duplicate=False)}
    return [fqn for fqn in modules if f"{fqn}.{name}" in names] or modules


def _other_placement(pattern: str, kind: str, text: str) -> ValueError:
    return ValueError(
        f"tensor_parallel.sharding_plan: expected {_ONLY[kind]!r} for {pattern!r}, the only "
        f"placement that <{kind}> can have, got {text!r}"
    )


def _no_such_mark(pattern: str, kind: str) -> ValueError:
    return ValueError(
        f"tensor_parallel.sharding_plan: expected {_MARKS} in {pattern!r}, got <{kind}>"
    )


def _parse_draw(pattern: str, number: str, text: str) -> tuple[int, Shard | InterleavedShard]:
    placement = parse_placement(text)
    is_shard = isinstance(placement, Shard | InterleavedShard)
    if not number.isdigit() or not is_shard or placement.dim < 0:
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected '<random:k>': 'Shard(d)' or "
            "'InterleavedShard(d, parts)', the k-th draw of a module's call, both counted from 0, "
            f"got {pattern!r}: {text!r}"
        )
    return int(number), placement


def _argument_dim(pattern: str, text: str) -> Shard:
    placement = parse_placement(text)
    if not isinstance(placement, Shard):
        raise ValueError(
            "tensor_parallel.sharding_plan: expected 'Shard(d)', how what a module is called with "
            f"is sharded, for {pattern!r}, got {text!r}"
        )
    return placement


def _parts(pattern: str, text: str) -> int | None:
    match = _PARTS.fullmatch(text)
    if match is None or match[2] is not None:
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected 'Shard(0)' or 'Shard(0) of n' for "
            f"{pattern!r}, got {text!r}"
        )
    return None if match[1] is None else int(match[1])


def _counted(pattern: str, text: str) -> int | str | None:
    match = _PARTS.fullmatch(text)
    if match is None:
        raise ValueError(
            "tensor_parallel.sharding_plan: expected 'Shard(0)', 'Shard(0) of n' or, of what is "
            f"read of a parameter, 'Shard(0) of name.weight' for {pattern!r}, got {text!r}"
        )
    return match[2] or (None if match[1] is None else int(match[1]))


def _parameter_placement(pattern: str, text: str) -> Placement:
    placement = parse_placement(text)
    if isinstance(placement, Partial) or (isinstance(placement, Shard) and placement.dim < 0):
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected 'Shard(d)' with d from 0, "
            f"'InterleavedShard(d, parts)' or 'Replicate()' for {pattern!r}, got {text!r}"
        )
    return placement


def _matches(pattern: str, base: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    found = matching(base, names)
    if not found:
        shown = ", ".join(repr(name) for name in names[1:4])
        raise ValueError(
            f"tensor_parallel.sharding_plan: pattern {pattern!r} matches nothing in the "
            f"model; names look like {shown}"
        )
    return found


def shard_dim(placement: Placement | None) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None
