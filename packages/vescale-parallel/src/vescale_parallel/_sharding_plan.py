"""The sharding plan of tensor parallelism: patterns and placements as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard

_SHARD = re.compile(r"Shard\((\d+)\)")
_INTERLEAVED = re.compile(r"InterleavedShard\((\d+), ?(\d+)\)")
# What a mark can say; its opposite is said by leaving it out.
_ONLY = {"in": "Replicate()", "out": "Replicate()", "grad": "Partial()", "attr": "Shard(0)"}
_MARK = re.compile(r"(.*?)\.?<([a-z]+)(?::(\w+))?>")


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
        return InterleavedShard(int(match[1]), int(match[2]))
    raise ValueError(
        "expected 'Shard(d)', 'InterleavedShard(d, parts)', 'Replicate()' or 'Partial()', "
        f"got {text!r}"
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


@dataclass(frozen=True)
class Resolved:
    """A sharding plan applied to one model: exact names instead of patterns.

    Attributes:
        parameters: Parameter FQN to placement.
        inputs: Module FQN to placement of what it is called with.
        outputs: Module FQN to placement of what it returns.
        grads: Parameter FQN to placement of its gradient.
        attributes: (module FQN, attribute) of integers that count local things.
    """

    parameters: Mapping[str, Placement]
    inputs: Mapping[str, Placement]
    outputs: Mapping[str, Placement]
    grads: Mapping[str, Placement]
    attributes: frozenset[tuple[str, str]]


def resolve(sharding_plan: Mapping[str, str], model: nn.Module) -> Resolved:
    """Apply a sharding plan's patterns to the names of a model.

    Raises:
        ValueError: If a pattern matches nothing or a placement cannot be read.
    """
    parameters: dict[str, Placement] = {}
    marked: dict[str, dict[str, Placement]] = {"in": {}, "out": {}, "grad": {}}
    attributes: set[tuple[str, str]] = set()
    parameter_fqns = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    module_fqns = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    for pattern, text in sharding_plan.items():
        placement = parse_placement(text)
        mark = _MARK.fullmatch(pattern)
        if mark is None:
            parameters |= dict.fromkeys(_matches(pattern, pattern, parameter_fqns), placement)
            continue
        base, kind, attribute = mark[1], mark[2], mark[3]
        if kind in _ONLY and text != _ONLY[kind]:
            raise ValueError(
                f"tensor_parallel.sharding_plan: expected {_ONLY[kind]!r} for {pattern!r}, the "
                f"only placement that <{kind}> can have, got {text!r}"
            )
        if kind == "attr":
            owners = _matches(pattern, base, module_fqns)
            attributes |= {(fqn, attribute) for fqn in owners}
        elif kind in marked:
            names = parameter_fqns if kind == "grad" else module_fqns
            marked[kind] |= dict.fromkeys(_matches(pattern, base, names), placement)
        else:
            raise ValueError(
                f"tensor_parallel.sharding_plan: expected <in>, <out>, <grad> or "
                f"<attr:name> in {pattern!r}, got <{kind}>"
            )
    return Resolved(parameters, marked["in"], marked["out"], marked["grad"], frozenset(attributes))


def _matches(pattern: str, base: str, names: Iterable[str]) -> list[str]:
    expression = re.compile(r"[^.]+".join(map(re.escape, base.split("*"))))
    names = list(names)
    found = [name for name in names if expression.fullmatch(name)]
    if not found:
        shown = ", ".join(repr(name) for name in names[1:4])
        raise ValueError(
            f"tensor_parallel.sharding_plan: pattern {pattern!r} matches nothing in the "
            f"model; names look like {shown}"
        )
    return found


def generalize(fqn: str) -> str:
    """Return ``fqn`` with its numeric components replaced by ``*``."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))
