"""Optimizer state that one rank has whole, as distributed tensors that checkpoints reshard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, local_shape, named_failures

from .owners import owned_by
from .plain import Saved

Place = tuple[int, ...]  # of the owner on the mesh


@dataclass(frozen=True)
class _Whole:
    """A tensor that its owner has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def shown_state(
    own: Mapping[str, dict[str, Any]],
    places: Mapping[str, Place],
    mesh: DeviceMesh,
    devices: Mapping[str, torch.device],
) -> dict[str, dict[str, Any]]:
    """Return the state of all ranks by name of parameter. Every rank must call this.

    Tensors with dims are distributed, of which the owner has everything; others are everywhere.
    ``devices`` are those of the parameters, which their owners' state is on.
    """
    told: list[Any] = [None] * dist.get_world_size()
    with named_failures():
        dist.all_gather_object(
            told, {fqn: _tree(_told, each) for fqn, each in own.items() if each}
        )
    known = {fqn: described for each in told for fqn, described in each.items()}
    return {
        fqn: _shown(known[fqn], own[fqn] or None, places[fqn], mesh, devices[fqn])
        for fqn in own
        if fqn in known
    }


def taken_state(values: Mapping[str, Any], place: Place, mesh: DeviceMesh) -> dict[str, Any]:
    """Return state with whole tensors on the owner. Every rank must call this."""

    def taken(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            return value.clone()
        if value.device_mesh != mesh or not value.dim():
            return value.full_tensor().clone()
        wanted = owned_by(value.shape, place, mesh.shape)
        return value.redistribute(placements=wanted)._local_tensor.clone()

    return _tree(taken, dict(values))


def empty_state(
    saved: Mapping[str, Saved], place: Place, mesh: DeviceMesh, device: torch.device
) -> dict[str, Any]:
    """Return places for what a checkpoint has, by dotted path; digits are indices of lists."""
    nested: dict[str, Any] = {}
    for path, tensor in saved.items():
        *outer, last = path.split(".")
        inside = nested
        for name in outer:
            inside = inside.setdefault(name, {})
        shape = tuple(tensor.shape)
        if shape and 0 not in shape:
            inside[last] = _distributed(_Whole(shape, tensor.dtype), None, place, mesh, device)
        else:
            inside[last] = torch.zeros(shape, dtype=tensor.dtype)
    return {name: _with_lists(value) for name, value in nested.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inside: dict[str, Any] = {str(name): _with_lists(each) for name, each in value.items()}
    in_order = [str(index) for index in range(len(inside))]
    return [inside[name] for name in in_order] if set(inside) == set(in_order) else inside


def _tree(change: Callable[[Any], Any], value: Any) -> Any:
    """Change what dicts, lists and tuples hold."""
    if isinstance(value, dict):
        return {name: _tree(change, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_tree(change, each) for each in value)
    return change(value)


def _told(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() and value.numel():
        return _Whole(tuple(value.shape), value.dtype)
    return value.detach().cpu()


def _shown(described: Any, own: Any, place: Place, mesh: DeviceMesh, device: torch.device) -> Any:
    """Return what an owner described, with its own tensors where this rank is the owner."""
    if isinstance(described, dict):
        return {
            name: _shown(each, None if own is None else own[name], place, mesh, device)
            for name, each in described.items()
        }
    if isinstance(described, list | tuple):
        return type(described)(
            _shown(each, None if own is None else own[index], place, mesh, device)
            for index, each in enumerate(described)
        )
    if isinstance(described, _Whole):
        return _distributed(described, own, place, mesh, device)
    return described if own is None else own


def _distributed(
    whole: _Whole, own: Tensor | None, place: Place, mesh: DeviceMesh, device: torch.device
) -> DTensor:
    """Return a tensor of which one rank has everything; zeros if it is not given."""
    placements = owned_by(whole.shape, place, mesh.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    if own is None:
        part = local_shape(whole.shape, mesh.shape, coordinate, placements)
        own = torch.zeros(part, dtype=whole.dtype, device=device)
    return DTensor.from_local(own, mesh, placements, shape=whole.shape)
