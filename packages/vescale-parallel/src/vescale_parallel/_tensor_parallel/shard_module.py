"""A module of which every parameter is one rank's shard, and whose integers count these."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import local_boxes

from .chunks import part_sizes


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


def divide(module: nn.Module, fqn: str, attribute: str, parts: int) -> None:
    """Divide an integer that a module reads, its own or one of an object that it holds.

    A configuration that many modules hold is copied for this one, so that the others read what
    they did: ``"config.num_heads"``.

    Raises:
        ValueError: If there is no such integer, or ``parts`` does not divide it.
    """
    value = _integer(module, attribute)
    if value is None or value % parts:
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected {fqn}.{attribute} to be an integer that "
            f"tensor-parallel ranks can divide by {parts}, got {value!r}; leave it out"
        )
    *path, name = attribute.split(".")
    holder: Any = module
    for each in path:
        own = copy.copy(getattr(holder, each))
        _set(holder, each, own)
        holder = own
    _set(holder, name, value // parts)


def _set(holder: Any, name: str, value: Any) -> None:
    try:
        setattr(holder, name, value)
    except dataclasses.FrozenInstanceError:  # which is for those who share it; this is a copy
        object.__setattr__(holder, name, value)


def _integer(module: nn.Module, attribute: str) -> int | None:
    """Return the integer that an attribute is, dotted if another object holds it; or None."""
    try:
        value = attrgetter(attribute)(module)
    except AttributeError:
        return None
    return value if isinstance(value, int) else None
