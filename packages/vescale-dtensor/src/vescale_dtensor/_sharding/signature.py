"""How the dims of an operator's tensors belong together, and what follows for placements.

[Note: letters] A signature gives every tensor dim a letter, as einsum does, or None. Along a
letter the operator does the same thing at every index, whatever the other indices hold; so all
tensors that have the letter can be cut there, at the same places, and every rank computes its
part. A letter that a result lacks was reduced: results are then partial sums (or maxima, ...).
A dim without a letter has to be whole. Tensors in a set of ``linear`` may stay partial sums
together, because the operator commutes with adding up. Which of these a call uses on each mesh
axis is decided by the bytes that would have to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor._layout.boxes import local_shape
from vescale_dtensor._layout.layout import Layout, Placements, layout, without_partial
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    RaggedShard,
    is_sharded,
    on_dim,
    single_dim,
)
from vescale_dtensor._redistribute.plan import redistribution_numel

from .op_call import Function, OpCall, RankView

Letter = Any
Dims = tuple[Letter, ...]


@dataclass(frozen=True)
class Signature:
    """What :func:`choose` needs to know of an operator.

    Attributes:
        inputs: For every tensor argument, a letter or None per dim.
        outputs: The same for every tensor result; None instead of letters for one that every
            rank makes alike whatever it has, a seed for example.
        reduce: For letters that results lack: the reduction that completes them.
        linear: Sets of tensor arguments that may be partial sums together.
        arguments: The other arguments of a rank's own call, where they differ from the
            global call's (sizes, for example).
        function: Makes a rank's own call, where it is not the operator itself.
        partial_kinds: Reductions that commute with the operator, for ``linear``.
        reads: Whether the values of tensors matter, or their shapes only.
        added: Tensor arguments that are added to (or combined with) what is reduced, like the
            bias of a product: while its parts are pending, they have to be pending as well.
        accepts: Whether the operator can do with these layouts of its inputs, where letters
            alone do not say it.
    """

    inputs: Sequence[Dims]
    outputs: Sequence[Dims | None]
    reduce: Mapping[Letter, str] = field(default_factory=dict)
    linear: Sequence[frozenset[int]] = ()
    arguments: Callable[[RankView], dict[str, Any]] | None = None
    function: Callable[[RankView], Function] | None = None
    partial_kinds: frozenset[str] = frozenset({"sum", "avg"})
    reads: bool = True
    added: frozenset[int] = frozenset()
    accepts: Callable[[Sequence[Layout]], bool] | None = None


@dataclass(frozen=True, slots=True)
class Repeated:
    """The letter of a result's dim that is several times the dim of an input, one after another.

    Attributes:
        letter: Of the input's dim.
        count: How many times as long the result is.
    """

    letter: Letter
    count: int


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The placements of a call's inputs and outputs, as in torch's strategies of operators."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A letter is sharded over the mesh axis, in the way of ``pattern``."""

    letter: Letter
    pattern: Placement


@dataclass(frozen=True, slots=True)
class _Partial:
    """The tensors of one linear set are partial over the mesh axis."""

    tensors: frozenset[int]
    kind: str


@dataclass(frozen=True, slots=True)
class _Flattened:
    """All tensors are cut over several dims at once, or numbers that one rank has."""

    placement: RaggedShard
    numbers: bool


_Option = _Sharded | _Partial | _Flattened | None


def choose(call: OpCall, signature: Signature) -> OpSpec | None:
    """Return the placements under which the call moves fewest bytes, None if there are none.

    Tensors that the call writes into stay where they are.
    """
    axes = range(call.mesh.ndim)
    best: tuple[tuple[bool, float], OpSpec] | None = None
    for options in product(*(list(_options(call, signature, axis)) for axis in axes)):
        op_spec = _apply(call, signature, options)
        if op_spec is None:
            continue
        cost = _cost(call, op_spec)
        if best is None or cost < best[0]:
            best = cost, op_spec
            if cost == (False, 0.0):
                break
    return None if best is None else best[1]


def _options(call: OpCall, signature: Signature, axis: int) -> Iterator[_Option]:
    """Yield what the call may do on one mesh axis: what is there already first."""
    seen: set[_Option] = set()
    for made, dims in zip(call.layouts, signature.inputs, strict=True):
        placement = made.placements[axis]
        if not is_sharded(placement):
            continue
        dim = single_dim(placement)
        flattened = dim is None or not made.shape
        if flattened and isinstance(placement, RaggedShard) and _is_flat(call, signature, dims):
            option = _Flattened(placement, not dims)
        elif dim is None or dim >= len(dims) or dims[dim] is None:
            continue
        else:
            option = _Sharded(dims[dim], on_dim(placement, 0))
        if option not in seen:
            seen.add(option)
            yield option
    for letter in _other_letters(call, signature, axis):
        option = _Sharded(letter, Shard(0))
        if option not in seen:
            seen.add(option)
            yield option
    for tensors in signature.linear:
        kinds = {
            placement.reduce_op
            for i in tensors
            if isinstance(placement := call.layouts[i].placements[axis], Partial)
        }
        for kind in sorted(kinds & signature.partial_kinds):
            option = _Partial(tensors, kind)
            if option not in seen:
                seen.add(option)
                yield option
    yield None


def _is_flat(call: OpCall, signature: Signature, dims: Dims) -> bool:
    """Whether all tensors have the letters ``dims``, and it does not matter what dims are.

    Arguments may be numbers, too.
    """
    if call.named("memory_format") in (torch.channels_last, torch.channels_last_3d):
        return False
    if signature.arguments is not None or signature.function is not None or None in dims:
        return False
    arguments = all(each in (dims, ()) for each in signature.inputs)
    return arguments and all(each == dims for each in signature.outputs)


def _other_letters(call: OpCall, signature: Signature, axis: int) -> Iterator[Letter]:
    """Yield letters to cut instead, for tensors that are cut where they have to be whole.

    To cut elsewhere is an all-to-all, which moves less than a gather, and leaves every rank
    its part of the work. Letters that do not cut evenly are left out.
    """
    for made, dims in zip(call.layouts, signature.inputs, strict=True):
        placement = made.placements[axis]
        dim = single_dim(placement)
        if not is_sharded(placement) or (
            dim is not None and dim < len(dims) and dims[dim] is not None
        ):
            continue
        for letter, size in zip(dims, made.shape, strict=True):
            if letter is None or not any(letter in dims for dims in signature.outputs if dims):
                continue
            if size and size % call.mesh.size(axis) == 0:
                yield letter


def _apply(call: OpCall, signature: Signature, options: Sequence[_Option]) -> OpSpec | None:
    inputs: list[Layout] = []
    for index, (made, dims) in enumerate(zip(call.layouts, signature.inputs, strict=True)):
        placements = tuple(_input_placement(signature, index, dims, option) for option in options)
        if index in call.written and placements != made.placements:
            return None
        if not fits(tuple(made.shape), tuple(made.mesh.shape), placements):
            return None
        unread = not signature.reads and placements == without_partial(made.placements)
        inputs.append(made if unread else made.placed(placements))
    if signature.accepts is not None and not signature.accepts(inputs):
        return None
    outputs: list[Layout] = []
    for tensor, dims in zip(call.outputs, signature.outputs, strict=True):
        placements = _output_placements(signature, dims, options)
        if placements is None:
            return None
        outputs.append(layout(call.mesh, placements, tensor.shape, tensor.stride(), tensor.dtype))
    return OpSpec(tuple(inputs), tuple(outputs))


def _input_placement(signature: Signature, index: int, dims: Dims, option: _Option) -> Placement:
    match option:
        case _Sharded(letter, pattern) if letter in dims:
            return on_dim(pattern, dims.index(letter))
        case _Sharded(letter, _) if index in signature.added and letter in signature.reduce:
            return Partial(signature.reduce[letter])
        case _Partial(tensors, kind) if index in tensors:
            return Partial(kind)
        case _Flattened(placement, numbers) if numbers != bool(dims):
            return placement
        case _:
            return Replicate()


def _output_placements(
    signature: Signature, dims: Dims | None, options: Sequence[_Option]
) -> Placements | None:
    if dims is None:
        return (Replicate(),) * len(options)
    placements: list[Placement] = []
    for option in options:
        match option:
            case _Sharded(letter, pattern):
                repeated = _repeated(dims, letter)
                if letter in dims:
                    placements.append(on_dim(pattern, dims.index(letter)))
                elif letter in signature.reduce:
                    placements.append(Partial(signature.reduce[letter]))
                elif repeated is not None and _is_plain(letter, options):
                    placements.append(InterleavedShard(*repeated))
                else:
                    return None
            case _Partial(_, kind):
                placements.append(Partial(kind))
            case _Flattened(placement, _):
                placements.append(placement)
            case _:
                placements.append(Replicate())
    return tuple(placements) if _one_kind(placements) else None


def _repeated(dims: Dims, letter: Letter) -> tuple[int, int] | None:
    """Return the dim that repeats ``letter``, and how many times."""
    found = [
        (dim, each.count)
        for dim, each in enumerate(dims)
        if isinstance(each, Repeated) and each.letter == letter
    ]
    return found[0] if found else None


def _is_plain(letter: Letter, options: Sequence[_Option]) -> bool:
    """Whether one axis cuts the letter, as ``Shard`` does."""
    cuts = [o for o in options if isinstance(o, _Sharded) and o.letter == letter]
    return len(cuts) == 1 and type(cuts[0].pattern) is Shard


def _one_kind(placements: Sequence[Placement]) -> bool:
    """Whether pending reductions commute: sums and averages do, sums and maxima do not."""
    kinds = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(kinds) <= 1 or kinds == {"sum", "avg"}


def _cost(call: OpCall, op_spec: OpSpec) -> tuple[bool, float]:
    """Return whether anything moves now, and the bytes that move, now and later.

    What moves nothing now goes first, whatever a pending sum may cost later: it can be added to
    others, be reduced once for many microbatches, and end as a reduce-scatter. So layers that
    are cut to need no communication have none, for any number of tokens. Among those that do
    move something, a pending sum counts as twice its bytes, which is what reducing it to all
    ranks costs; work that every rank repeats is weighed as a twentieth of the bytes it touches.
    """
    moved = 0.0
    for made, wanted in zip(call.layouts, op_spec.inputs, strict=True):
        if made is not wanted:
            mesh_shape = tuple(made.mesh.shape)
            moved += made.dtype.itemsize * redistribution_numel(
                tuple(made.shape), mesh_shape, made.placements, wanted.placements
            )
    if not moved and not any(made.is_partial for made in op_spec.outputs):
        return False, 0.0
    total = moved
    for made in op_spec.outputs:
        nbytes = _numel(made) * made.dtype.itemsize
        num_parts = 1
        for axis, placement in enumerate(made.placements):
            if isinstance(placement, Partial):
                total += 2 * nbytes
            elif is_sharded(placement):
                num_parts *= made.mesh.size(axis)
        total += nbytes / num_parts / 20
    return bool(moved), total


def _numel(made: Layout) -> int:
    return made.shape.numel()


@lru_cache(maxsize=1 << 14)
def fits(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Placements) -> bool:
    """Whether every placement can cut what the axes before it left of its dim.

    Only ragged and interleaved cuts depend on the size.
    """
    if not any(isinstance(p, RaggedShard | InterleavedShard) for p in placements):
        return True
    ranges = [
        range(size) if is_sharded(placement) else range(1)
        for size, placement in zip(mesh_shape, placements, strict=True)
    ]
    try:
        for coordinate in product(*ranges):
            local_shape(shape, mesh_shape, coordinate, placements)
    except ValueError:
        return False
    return True
