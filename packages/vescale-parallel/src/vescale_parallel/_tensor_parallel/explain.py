"""What tensor parallelism made of each module, and what every line of the model sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import CommCounter, InterleavedShard
from vescale_parallel._mesh.transfers import Sent, listening
from vescale_parallel._model.fqns import generalize, matching
from vescale_parallel._model.user_line import user_line

from .conversions import Boundary, Crossing
from .sharding_spec import placement_text, placements_text
from .tensor_sharding import TensorSharding

Outcome = Literal["erased", "localised", "whole", "DTensor behind"]


@dataclass(frozen=True)
class Applied:
    """What tensor parallelism did to a model.

    Attributes:
        sharding: How its tensors are sharded.
        boundary: What does the collectives; None for one rank.
        left_whole: Patterns of parameters that were not sharded, and why.
    """

    sharding: TensorSharding
    boundary: Boundary | None
    left_whole: Mapping[str, str] = field(default_factory=dict[str, str])


def said_whole(reasons: Sequence[str]) -> dict[str, str]:
    """Return what a plan's reasons say of parameters that stay whole."""
    start = "replicated: "
    said = (each.removeprefix(start) for each in reasons if each.startswith(f"{start}"))
    pairs = (each.partition(": ") for each in said)
    return {names: why for names, _, why in pairs if why}


@dataclass(frozen=True)
class ModuleReport:
    """How a kind of module runs.

    Attributes:
        pattern: Its names, ``*`` for numbers.
        outcome: ``"erased"``: its own forward on this rank's shards, as plain tensors;
            ``"localised"``: likewise, with the integers divided that count heads or features;
            ``"DTensor behind"``: it returns a DTensor; ``"whole"``: every rank
            does the same.
        reason: What makes it so.
        modules: How many there are.
    """

    pattern: str
    outcome: Outcome
    reason: str
    modules: int


@dataclass
class Traffic:
    """What one line of the model sent where sharded regions begin and end.

    Attributes:
        source: File and line of the model's code.
        module: Pattern of the module whose forward was running.
        what: ``"enter"``, ``"leave"``, ``"split"`` or ``"gather"``.
        forward: Collective of the forward pass, empty for none.
        backward: Collective of its backward, empty for none.
        calls: How often.
        nbytes: Sent by this rank, forward and backward together.
    """

    source: str
    module: str
    what: str
    forward: str
    backward: str
    calls: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class AxisTraffic:
    """What this rank sent along one axis of the mesh, in one way.

    Attributes:
        axis: ``"dp_shard"``, ``"dp_replicate"``, ``"tp"`` or ``"pp"``; several that act as one
            group are joined by ``+``.
        what: The collective, or what stages of a pipeline send each other.
        calls: How often.
        nbytes: Sent by this rank to others.
    """

    axis: str
    what: str
    calls: int
    nbytes: int


@dataclass
class ParallelExplanation:
    """What :func:`explain` saw; printed, it is three tables.

    Attributes:
        modules: One entry per kind of module.
        traffic: One entry per line and kind, in the order of the forward pass.
        counted: Every collective of the block, those of gradients and losses included.
        transfers: What was sent from rank to rank, in a pipeline or a ring, and its bytes.
    """

    modules: list[ModuleReport]
    traffic: list[Traffic] = field(default_factory=list[Traffic])
    counted: CommCounter = field(default_factory=CommCounter)
    transfers: list[tuple[Sent, int]] = field(default_factory=list["tuple[Sent, int]"])

    @property
    def axes(self) -> list[AxisTraffic]:
        """What was sent along every axis: parameters, gradients, activations and all."""
        found: dict[tuple[str, str], list[int]] = {}
        for event in self.counted.events:
            found.setdefault((event.over, event.kind), []).append(event.nbytes)
        for what, nbytes in self.transfers:
            over = "cp" if what == "send slices" else "pp"
            found.setdefault((over, what), []).append(nbytes)
        return [AxisTraffic(*key, len(sent), sum(sent)) for key, sent in sorted(found.items())]

    def __str__(self) -> str:
        modules = [("module", "runs", "because")]
        modules += [(m.pattern, m.outcome, m.reason) for m in self.modules]
        traffic = [("line", "in", "forward", "backward", "calls", "bytes")]
        traffic += [
            (t.source, t.module, t.forward or "-", t.backward or "-", f"{t.calls}", f"{t.nbytes}")
            for t in self.traffic
        ]
        others = self.counted.nbytes - sum(t.nbytes for t in self.traffic)
        traffic.append(("gradients, parameters, loss", "", "", "", "", f"{others}"))
        axes = [("axis", "collective", "calls", "bytes sent")]
        axes += [(a.axis, a.what, f"{a.calls:,}", f"{a.nbytes:,}") for a in self.axes]
        return "\n".join([*_aligned(modules), "", *_aligned(traffic), "", *_aligned(axes)])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


@contextmanager
def explain(model: nn.Module) -> Iterator[ParallelExplanation]:
    """Tell how each module of a parallelized model runs, and what is sent, by line and by axis.

    Run a step, forward and backward, in the block; every rank must run it.

    Args:
        model: What :func:`parallelize` returned.

    Raises:
        ValueError: If the model was not parallelized.
    """
    applied = getattr(model, "_vescale_sharding", None)
    if not isinstance(applied, Applied):
        raise ValueError(f"expected a parallelized model, got {type(model).__name__}")
    found = ParallelExplanation(_modules(model, applied))
    inside: list[str] = []
    entries: dict[tuple[str, str, str], Traffic] = {}
    boundary = applied.boundary

    def hear(crossing: Crossing) -> None:
        assert boundary is not None
        module = generalize(inside[-1]) if inside else ""
        filename, line = user_line()
        key = (f"{Path(filename).name}:{line}", module, crossing.kind)
        if key not in entries:
            entries[key] = Traffic(*key, *_collectives(crossing))
            found.traffic.append(entries[key])
        entries[key].calls += 1
        entries[key].nbytes += _nbytes(crossing, boundary.ranks.size)

    with ExitStack() as stack:
        _follow(model, inside, stack)
        stack.enter_context(found.counted)
        stack.enter_context(listening(lambda *sent: found.transfers.append(sent)))
        if boundary is not None:
            boundary.listener = hear
            stack.callback(setattr, boundary, "listener", None)
        yield found


def _modules(model: nn.Module, applied: Applied) -> list[ModuleReport]:
    reports: dict[tuple[str, str, str], int] = {}
    sharding, spec = applied.sharding, applied.sharding.spec
    for fqn, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        cut = [
            f"{name} {placement_text(sharding.placements[f'{fqn}.{name}'])}"
            for name in own
            if sharding.placements.get(f"{fqn}.{name}", Replicate()) != Replicate()
        ]
        integers = [
            f"{name} as {counted} is read"
            if isinstance(counted, str)
            else f"{name} / {counted or 'ranks'}"
            for (owner, name), counted in spec.attributes.items()
            if owner == fqn
        ]
        shared = [f"part of {spec.shared[fqn]}"] if fqn in spec.shared else []
        added = [f"{name} on rank 0" for name in own if f"{fqn}.{name}" in spec.reads]
        added += [
            f"{name} read as {placements_text(parts)}"
            for (module_fqn, name), parts in spec.read_parts.items()
            if module_fqn == fqn
        ]
        added += [
            f"{name} read as {part.text}"
            for (module_fqn, name), part in spec.slices.items()
            if module_fqn == fqn
        ]
        if fqn in spec.shaped:
            integers.append("the shape of its input as of a rank's shard")
        move = spec.outputs.get(fqn)
        outcome: Outcome = "whole"
        if move is not None and move.source == move.target == Shard(-1):
            outcome = "DTensor behind"
        elif integers:
            outcome = "localised"
        elif cut or shared:
            outcome = "erased"
        around = spec.whole.get((fqn, ""))
        whole = [] if around is None else [f"dim {around.dim} is gathered around it"]
        if own or integers or whole or added:
            why = ", ".join([*cut, *integers, *shared, *added, *whole])
            why = why or _why_whole(fqn, own, applied.left_whole)
            key = (generalize(fqn), outcome, why)
            reports[key] = reports.get(key, 0) + 1
    return [
        ModuleReport(pattern or "(the model)", outcome, why, count)  # pyright: ignore[reportArgumentType]: an Outcome
        for (pattern, outcome, why), count in reports.items()
    ]


def _why_whole(fqn: str, own: Sequence[str], left_whole: Mapping[str, str]) -> str:
    """Return what was said of a module's parameters when the plan was made."""
    names = {f"{fqn}.{name}".strip(".") for name in own}
    for said, why in left_whole.items():
        patterns = [each.partition(" ")[0] for each in said.split(", ")]
        if any(matching(pattern, names) for pattern in patterns):
            return f"not sharded: {why}"
    return "not sharded"


def _collectives(crossing: Crossing) -> tuple[str, str]:
    cut = crossing.dim is not None
    match crossing.kind:
        case "enter":
            return ("all_gather", "reduce_scatter") if cut else ("", "all_reduce")
        case "leave":
            return ("reduce_scatter", "all_gather") if cut else ("all_reduce", "")
        case "split":
            return "", "all_gather"
        case "gather":
            return "all_gather", ""


def _nbytes(crossing: Crossing, num_ranks: int) -> int:
    """Return what a ring sends, forward and backward, if both happen."""
    passes = 1 if crossing.kind in ("split", "gather") else 2
    return passes * crossing.whole_nbytes * (num_ranks - 1) // num_ranks


def _follow(model: nn.Module, inside: list[str], stack: ExitStack) -> None:
    """Keep the name of the module whose forward is running at the end of ``inside``."""
    for fqn, module in model.named_modules():

        def enter(_: nn.Module, args: Any, fqn: str = fqn) -> None:
            inside.append(fqn)

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            inside.pop()

        stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)


@dataclass(frozen=True)
class PackedDim:
    """A dim that is made of parts, each sharded on its own or whole on every rank.

    Attributes:
        lengths: Of the parts, or how they relate.
        is_whole: Of each part, whether ranks have all of it.
    """

    lengths: tuple[int, ...]
    is_whole: tuple[bool, ...]


def packed_dims(model: nn.Module) -> frozenset[PackedDim]:
    """Return the packed dims that tensor parallelism sharded or reads in a parallelized model.

    Parts that are equally long and all sharded are not among them.
    """
    applied = getattr(model, "_vescale_sharding", None)
    if not isinstance(applied, Applied):
        return frozenset()
    placements = applied.sharding.placements
    found: set[PackedDim] = set()
    for placement in placements.values():
        lengths = _lengths(placement)
        if lengths:
            found.add(PackedDim(lengths, (False,) * len(lengths)))
    for (module, name), read in applied.sharding.spec.read_parts.items():
        if f"{module}.{name}" in placements:
            lengths = _lengths(placements[f"{module}.{name}"]) or (1,) * len(read)
            found.add(PackedDim(lengths, tuple(each == Replicate() for each in read)))
    return frozenset(found)


def _lengths(placement: object) -> tuple[int, ...]:
    """Return how long the parts are, nothing if they are equally long."""
    is_packed = isinstance(placement, InterleavedShard)
    return placement.parts if is_packed and isinstance(placement.parts, tuple) else ()
