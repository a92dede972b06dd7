"""A module of which every parameter is one rank's shard, and whose integers count these.

[Note: shapes of shards] Code takes a layer's width from its input, too: ``B, T, C = x.shape`` and
then ``y.view(B, T, C)``, as nanoGPT and many image models attend. The input is whole, and what is
viewed is a rank's heads. Such a forward is handed an activation that is whole and answers with the
shape that a shard of it has; operators take what it is. Whether the code means that by the shape
is shown by the proof of a sharding plan, as it is of integers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import local_boxes
from vescale_parallel._torch_private import make_wrapper, pytree

from .chunks import part_sizes, parts_of
from .read_by_forward.parameters import ReadParts
from .sharding_spec import ShardingSpec
from .tensor_sharding import TensorSharding

# What an attribute counts: an integer, or the lengths of parts behind each other.
Counted = int | list[int] | tuple[int, ...]


def cut_parameters(
    module: nn.Module,
    placements: Mapping[str, Placement],
    size: int,
    rank: int,
    prefix: str = "",
) -> None:
    """Replace whole parameters by a rank's shards, tied ones by tied ones."""
    parts: dict[int, nn.Parameter] = {}
    for fqn, parameter in list(module.named_parameters(remove_duplicate=False)):
        placement = placements.get(f"{prefix}.{fqn}".strip("."), Replicate())
        if placement == Replicate():
            continue
        if id(parameter) not in parts:
            part = _shared_part(parameter, placement, size, rank)
            parts[id(parameter)] = nn.Parameter(part, parameter.requires_grad)
        owner, _, name = fqn.rpartition(".")
        module.get_submodule(owner)._parameters[name] = parts[id(parameter)]


def _shared_part(parameter: nn.Parameter, placement: Placement, size: int, rank: int) -> Tensor:
    """Return what one rank holds of a parameter, in the same memory where it is contiguous."""
    boxes = local_boxes(parameter.shape, (size,), (rank,), (placement,))
    # Not detach(): a write to a part must not count as one to what backward of others kept.
    if len(boxes) == 1 and (part := parameter.data[boxes[0].box.slices]).is_contiguous():
        return part
    return rank_part(parameter.detach(), placement, size, rank)


def rank_part(tensor: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    """Return a copy of what one rank holds of a tensor; of one number expanded, that expanded."""
    boxes = local_boxes(tensor.shape, (size,), (rank,), (placement,))
    dim = getattr(placement, "dim", 0)
    if not boxes:  # of few rows the last rank has none
        return tensor.narrow(dim, 0, 0).clone()
    if not any(tensor.stride()):
        shape = list(tensor.shape)
        shape[dim] = sum(held.box.shape[dim] for held in boxes)
        return tensor.new_zeros(()).add_(tensor[(0,) * tensor.dim()]).expand(shape)
    return torch.cat([tensor[held.box.slices] for held in boxes], dim)


def placement_between(whole: Tensor, part: Tensor, size: int) -> Placement | None:
    """Return how rank 0's shard of an activation lies in the whole; None if it does not."""
    if whole.dim() != part.dim():
        return None
    different = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
    if not different:
        return Replicate()
    dim = different[0]
    fits = part.shape[dim] == part_sizes(whole.shape[dim], size)[0]
    return Shard(dim) if fits and len(different) == 1 else None


def count_local(
    modules: Mapping[str, nn.Module],
    spec: ShardingSpec,
    placements: Mapping[str, Placement],
    size: int,
) -> None:
    """Have the integers of modules that a plan names count what is on a rank.

    Raises:
        ValueError: If one does not count what the plan says.
    """
    for (fqn, attribute), value in _counts(modules, spec, placements, size).items():
        _replace(modules[fqn], attribute, value)
    for fqn, placement in spec.shaped.items():
        if fqn in modules:
            _give_shape_of_shard(modules[fqn], placement.dim, size)


class _OfShard(Tensor):
    """A whole activation that answers with the shape of a rank's shard."""

    whole: Tensor
    shape_of_shard: torch.Size

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == Tensor.shape.__get__:  # pyright: ignore[reportAttributeAccessIssue]: a C descriptor
            return args[0].shape_of_shard
        if func is Tensor.size:
            (dim,) = (*args[1:], *(kwargs or {}).values()) or (None,)
            return args[0].shape_of_shard if dim is None else args[0].shape_of_shard[dim]
        return func(*whole_of(args), **whole_of(kwargs or {}))


class _WithoutMemory(_OfShard):
    """Such an activation, of which what passes operators of torch by fails."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} on an activation that answers with the shape of a shard")


def _of_shard(whole: Tensor, dim: int, size: int) -> Tensor:
    if whole.shape[dim] % size:
        return whole
    if torch.compiler.is_compiling():  # which traces neither the other class nor its constructor
        made: Any = whole.as_subclass(_OfShard)
    else:
        made = make_wrapper(_WithoutMemory, whole.shape, dtype=whole.dtype, device=whole.device)
    shape = list(whole.shape)
    shape[dim] //= size
    made.whole, made.shape_of_shard = whole, torch.Size(shape)
    return made


def whole_of(tree: Any) -> Any:
    """Return what activations are that answer with the shape of a shard."""
    return pytree.tree_map_only(_OfShard, lambda made: made.whole, tree)


def _give_shape_of_shard(module: nn.Module, dim: int, size: int) -> None:
    """Have forward read a rank's length of a dim of its first activation."""
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        for place, value in enumerate(given):
            if isinstance(value, Tensor) and value.is_floating_point():
                given[place] = _of_shard(value, dim, size)
                break
        named = dict(zip(kwargs, given[len(args) :], strict=True))
        return whole_of(own(*given[: len(args)], **named))

    module.forward = forward


def check_counts(model: nn.Module, sharding: TensorSharding) -> None:
    """Raise if an integer of a module does not count what a plan says.

    Raises:
        ValueError: With the name of the integer.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _counts(modules, sharding.spec, sharding.placements, sharding.size)


def _counts(
    modules: Mapping[str, nn.Module],
    spec: ShardingSpec,
    placements: Mapping[str, Placement],
    size: int,
) -> dict[tuple[str, str], Counted]:
    """Return what integers that a plan names are on a rank."""
    found: dict[tuple[str, str], Counted] = {}
    parts_read = {f"{fqn}.{name}": parts for (fqn, name), parts in spec.read_parts.items()}
    for (fqn, attribute), counted in sorted(spec.attributes.items(), key=lambda item: item[0]):
        if fqn not in modules:
            continue
        if not isinstance(counted, str):
            parts = size if counted is None else counted
            found[fqn, attribute] = _divided(modules[fqn], fqn, attribute, parts)
            continue
        name = f"{fqn}.{counted}"
        several = _integers(modules[fqn], attribute)
        if several is not None:
            placement = placements.get(name, Replicate())
            read = ReadParts(placement, parts_read.get(name, ()))
            found[fqn, attribute] = _lengths_read(several, fqn, attribute, read, size)
            continue
        if name not in parts_read:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqn}.{attribute} is said to be as long as what "
                f"is read of {counted!r}, of which no parts are read whole; write 'Shard(0)'"
            )
        read = ReadParts(placements[name], parts_read[name])
        found[fqn, attribute] = _length_read(modules[fqn], fqn, attribute, read, size)
    return found


def _divided(module: nn.Module, fqn: str, attribute: str, parts: int) -> int:
    """Return a part of an integer that a module reads, its own or one of an object it holds."""
    value = _integer(module, attribute)
    if value is None or value % parts:
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected {fqn}.{attribute} to be an integer that "
            f"tensor-parallel ranks can divide by {parts}, got {value!r}; leave it out"
        )
    return value // parts


def _length_read(module: nn.Module, fqn: str, attribute: str, read: ReadParts, size: int) -> int:
    """Return the length that a rank reads of a parameter that is as long as an integer."""
    value = _integer(module, attribute)
    parts = parts_of(read.placement)
    fits = value is not None and (
        value == sum(parts) if isinstance(parts, tuple) else value % (size * parts) == 0
    )
    if value is None or not fits:
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected {fqn}.{attribute} to be an integer that is "
            f"as long as parts {parts}, got {value!r}; leave it out"
        )
    return sum(read.read_lengths(value // size, size))


def _lengths_read(
    several: list[int] | tuple[int, ...], fqn: str, attribute: str, read: ReadParts, size: int
) -> list[int] | tuple[int, ...]:
    """Return the lengths in which a rank's code splits what a packed parameter makes."""
    total, parts = sum(several), parts_of(read.placement)
    whole = parts if isinstance(parts, tuple) else (total // parts,) * parts
    own = read.read_lengths(total // size, size)
    places = [_place_on_rank(at, whole, own) for at in itertools.accumulate(several, initial=0)]
    found = [b - a for a, b in itertools.pairwise(p for p in places if p is not None)]
    if read.placement == Replicate() or sum(whole) != total or None in places:
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected {fqn}.{attribute} to be the lengths of "
            f"parts {parts} of what is sharded, got {several!r}; leave it out"
        )
    return found if isinstance(several, list) else tuple(found)


def _place_on_rank(at: int, whole: Sequence[int], own: Sequence[int]) -> int | None:
    """Return where on a rank an element is; None within a part that is sharded."""
    start = place = 0
    for length, here in zip(whole, own, strict=True):
        if at < start + length:
            return place + at - start if at == start or here == length else None
        start, place = start + length, place + here
    return place


def _replace(module: nn.Module, attribute: str, value: Counted) -> None:
    """Set an integer that a module reads, its own or one of an object that it holds.

    A configuration that many modules hold is copied for this one, so that the others read what
    they did: ``"config.num_heads"``.
    """
    *path, name = attribute.split(".")
    holder: Any = module
    for each in path:
        own = copy.copy(getattr(holder, each))
        _set(holder, each, own)
        holder = own
    _set(holder, name, value)


def _set(holder: Any, name: str, value: Any) -> None:
    try:
        setattr(holder, name, value)
    except dataclasses.FrozenInstanceError:  # which is for those who share it; this is a copy
        object.__setattr__(holder, name, value)


def _integer(module: nn.Module, attribute: str) -> int | None:
    """Return the integer that an attribute is, dotted if another object holds it; or None."""
    value = _value(module, attribute)
    return value if isinstance(value, int) else None


def _integers(module: nn.Module, attribute: str) -> list[int] | tuple[int, ...] | None:
    """Return the list of integers that an attribute is, or None."""
    value = _value(module, attribute)
    is_list = isinstance(value, list | tuple) and all(isinstance(each, int) for each in value)
    return value if is_list else None


def _value(module: nn.Module, attribute: str) -> Any:
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        return None
