"""The placement of every sharded parameter, checked against the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.linear_layout import linear_kind

from .attention_heads import check_attention
from .chunks import part_sizes, parts_of, shard_of_parts
from .sharding_spec import ShardingSpec, placement_text, shard_dim


def complete_placements(spec: ShardingSpec, model: nn.Module, size: int) -> dict[str, Placement]:
    """Return the placement of every sharded parameter, biases of column-wise linears included.

    Raises:
        ValueError: If a parameter has no such dim, or it does not divide into the ranks.
    """
    placements = dict(spec.parameters)
    _check_moves(spec, model)
    _check_shared(spec, model, size)
    _check_reads(spec, model)
    _check_whole(spec, model)
    _check_slices(spec, model)
    check_attention(dict(model.named_modules(remove_duplicate=False)), placements, size)
    for fqn, placement in spec.parameters.items():
        if not isinstance(placement, Shard | InterleavedShard):
            continue
        owner_fqn, _, name = fqn.rpartition(".")
        owner = model.get_submodule(owner_fqn)
        kind = linear_kind(owner)
        rows = isinstance(owner, nn.Embedding) and placement == Shard(0)
        head = owner_fqn in spec.outputs and isinstance(placement, Shard)
        shape = model.get_parameter(fqn).shape
        # Biases are as long as the weights that they belong to.
        uneven = rows or head or (len(shape) == 1 and isinstance(placement, Shard))
        _check_divides(fqn, shape, placement, size, even=not uneven)
        if isinstance(owner, nn.Embedding) and owner.max_norm is not None:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {owner_fqn!r} is an embedding with max_norm, "
                "which rescales whole rows in place, and cannot be sharded; leave it out"
            )
        if rows and not all(part_sizes(model.get_parameter(fqn).shape[0], size)):
            raise ValueError(
                f"tensor_parallel.sharding_plan: {owner_fqn!r} has too few rows ({shape[0]}) for "
                f"tensor_parallel.size {size}: every rank needs one; leave it out"
            )
        if kind is None or name != "weight" or owner._parameters.get("bias") is None:
            continue
        if placement.dim == kind.out_dim:
            placements[f"{owner_fqn}.bias"] = shard_of_parts(0, parts_of(placement))
    _check_read_parts(spec, model, placements, size)
    return placements


def _check_moves(spec: ShardingSpec, model: nn.Module) -> None:
    """Raise if a mark of one placement is not on a linear layer sharded that way."""
    moves = [(fqn, "<in>", move) for (fqn, _), move in spec.inputs.items()]
    moves += [(fqn, "<out>", move) for fqn, move in spec.outputs.items()]
    for fqn, mark, move in moves:
        kind = linear_kind(model.get_submodule(fqn))
        if move.source != Shard(-1):
            continue
        cut = getattr(spec.parameters.get(f"{fqn}.weight"), "dim", None)
        wanted = None if kind is None else kind.out_dim if mark == "<out>" else kind.in_dim
        stays = mark == "<out>" and move.target == Shard(-1)
        if kind is None or cut != wanted or not (stays or move.target == Replicate()):
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqn}.{mark} with one placement is for the "
                "sharded features of a linear layer, 'Replicate()' or, of an output, 'Shard(-1)'; "
                f"{fqn!r} is none that is sharded so; write 'Replicate() -> Shard(1)' to "
                "redistribute an activation"
            )


def _check_shared(spec: ShardingSpec, model: nn.Module, size: int) -> None:
    for fqn, parts in spec.shared.items():
        module = model.get_submodule(fqn)
        kind = linear_kind(module)
        if kind is None or f"{fqn}.weight" in spec.parameters:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqn}.<part> is for a linear layer whose weight "
                f"is not sharded; leave out <part>, or the placement of {fqn}.weight"
            )
        length = module.get_parameter("weight").shape[kind.out_dim]
        if size % parts or length % parts:
            raise ValueError(
                f"tensor_parallel.sharding_plan: expected the parts of {fqn}.<part> to divide "
                f"tensor_parallel.size ({size}) and its output features ({length}), got {parts}"
            )


def _check_reads(spec: ShardingSpec, model: nn.Module) -> None:
    for fqn in spec.reads:
        owner = fqn.rpartition(".")[0]
        is_linear = linear_kind(model.get_submodule(owner)) is not None
        if fqn in spec.parameters or (is_linear and f"{owner}.weight" in spec.parameters):
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqn}.<read> is for a whole parameter that a "
                "module adds to its partial sums; sharded ones are none, and of a sharded linear "
                "layer the bias is added once as it is; leave out <read>"
            )


def _check_whole(spec: ShardingSpec, model: nn.Module) -> None:
    for fqn, argument in spec.whole:
        if not argument:
            continue
        names = list(inspect.signature(model.get_submodule(fqn).forward).parameters)
        if argument not in names or (fqn, "") not in spec.whole:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqn}.<whole:{argument}> is for an argument of "
                f"{fqn!r}, of {names}, beside {fqn}.<whole> for the first activation"
            )


def _check_slices(spec: ShardingSpec, model: nn.Module) -> None:
    for fqn, argument in spec.slices:
        names = list(inspect.signature(model.get_submodule(fqn).forward).parameters)
        if argument not in names:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqn}.<slice:{argument}> is for an argument of "
                f"{fqn!r}, of {names}"
            )


def _check_read_parts(
    spec: ShardingSpec, model: nn.Module, placements: Mapping[str, Placement], size: int
) -> None:
    names = {fqn for fqn, _ in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for (module, name), parts in spec.read_parts.items():
        fqn = f"{module}.{name}"
        owner = fqn.rpartition(".")[0]
        # What batch norm writes is not seen to be written: its operator does not say so.
        if fqn in buffers and f"{owner}.running_mean" in buffers:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {module}.<read:{name}> is of statistics that "
                f"{owner!r} writes to buffer {name!r}, which is whole; leave it out"
            )
        if len(parts) == 1:
            _check_shards_of_buffer(model, placements, module, name, parts[0], size)
            continue
        if fqn in buffers:
            buffer_placement(spec, placements, module, name, buffers[fqn])
            continue
        placement = placements.get(fqn)
        (dim,) = {shard_dim(each) for each in parts} - {None}
        wanted = InterleavedShard(dim or 0, len(parts))
        is_packed = isinstance(placement, InterleavedShard) and placement.dim == dim
        if fqn not in names or not is_packed or _num_parts(placement) != len(parts):
            raise ValueError(
                f"tensor_parallel.sharding_plan: {module}.<read:{name}> is for a parameter below "
                f"{module!r} that is sharded in {len(parts)} parts, as {placement_text(wanted)!r} "
                f"or by their lengths; {fqn!r} is "
                + ("none" if placement is None else placement_text(placement))
            )


def _check_shards_of_buffer(
    model: nn.Module,
    placements: Mapping[str, Placement],
    module: str,
    name: str,
    placement: Placement,
    size: int,
) -> None:
    """Raise unless a buffer has shards, or is as long as a sharded parameter below a module."""
    dim: int = getattr(placement, "dim", 0)
    buffer = dict(model.get_submodule(module).named_buffers()).get(name)
    lengths: set[int] = set()
    for fqn, each in placements.items():
        if fqn.startswith(f"{module}.") and isinstance(each, Shard):
            lengths.add(model.get_parameter(fqn).shape[each.dim])
    length = buffer.shape[dim] if buffer is not None and 0 <= dim < buffer.dim() else 1
    if buffer is not None and isinstance(placement, InterleavedShard):
        _check_divides(f"{module}.{name}", buffer.shape, placement, size, even=True)
    if length % size and length not in lengths:
        raise ValueError(
            f"tensor_parallel.sharding_plan: {module}.<read:{name}> {placement_text(placement)!r} "
            f"is for a buffer with as many elements along a dim for each of {size} ranks, or as "
            f"long as a parameter below {module!r} that is sharded, and there is none; a "
            "parameter is read as it is sharded"
        )


def buffer_placement(
    spec: ShardingSpec, placements: Mapping[str, Placement], module: str, name: str, buffer: Tensor
) -> Shard | InterleavedShard:
    """Return the parts of a buffer, which are those of a parameter read in the same way.

    Raises:
        ValueError: If there is no such parameter below the module.
    """
    parts = spec.read_parts[module, name]
    if len(parts) == 1 and isinstance(parts[0], Shard | InterleavedShard):
        return parts[0]
    (dim,) = {shard_dim(each) for each in parts} - {None}
    assert dim is not None
    as_long = buffer.shape[dim] if 0 <= dim < buffer.dim() else 0
    for (owner, other), each in spec.read_parts.items():
        placement = placements.get(f"{owner}.{other}")
        alike = [one == Replicate() for one in each] == [one == Replicate() for one in parts]
        if not alike or not f"{owner}.{other}".startswith(f"{module}."):
            continue
        lengths = parts_of(placement) if placement is not None else 1
        if isinstance(lengths, tuple) and sum(lengths) == as_long:
            return InterleavedShard(dim, lengths)
    raise ValueError(
        f"tensor_parallel.sharding_plan: {module}.<read:{name}> is for a buffer as long as a "
        f"parameter below {module!r} of which the same parts are read whole, and there is none"
    )


def _num_parts(placement: Placement | None) -> int:
    parts = 1 if placement is None else parts_of(placement)
    return len(parts) if isinstance(parts, tuple) else parts


def _check_divides(
    fqn: str, shape: torch.Size, placement: Shard | InterleavedShard, size: int, *, even: bool
) -> None:
    if not 0 <= placement.dim < len(shape):
        raise ValueError(
            f"tensor_parallel.sharding_plan: {fqn!r} has shape {tuple(shape)} and no dim "
            f"{placement.dim} to shard"
        )
    length, parts = shape[placement.dim], parts_of(placement)
    if isinstance(parts, tuple):
        _check_lengths(fqn, length, placement, parts, size)
    elif even and length % (unit := size * parts):
        raise ValueError(
            f"tensor_parallel.sharding_plan: dim {placement.dim} of {fqn!r} has size {length} "
            f"and needs a multiple of {unit} for tensor_parallel.size {size}; the nearest are "
            f"{length // unit * unit or unit} and {(length // unit + 1) * unit}"
        )


def _check_lengths(
    fqn: str, length: int, placement: Placement, parts: tuple[int, ...], size: int
) -> None:
    if sum(parts) != length or any(part % size for part in parts):
        raise ValueError(
            f"tensor_parallel.sharding_plan: expected parts of {fqn!r} that are {length} long "
            f"together, each a multiple of tensor_parallel.size {size}, got "
            f"{placement_text(placement)!r}"
        )
