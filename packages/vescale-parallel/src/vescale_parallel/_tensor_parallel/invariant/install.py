"""What is computed in chunks of a model, and what cannot be."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.tensor import Partial, Placement, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.apply import install
from vescale_parallel._tensor_parallel.chunks import parts_of
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding

from .boundary import InvariantBoundary


def install_invariant(
    model: nn.Module, sharding: TensorSharding, boundary: InvariantBoundary
) -> None:
    """Add collectives of tensor parallelism, and have layers compute in chunks, in place.

    ``sharding`` is that of as many ranks as there are chunks.
    """
    # Logits are gathered: what a program does with them is then one device's.
    install(model, sharding, boundary)
    modules = dict(model.named_modules())
    for owner, names in _by_owner(sharding).items():
        module = modules.get(owner)
        if module is None or (linear_kind(module) is not None and _is_row_wise(owner, sharding)):
            continue
        held = tuple(name for name in names if module._parameters.get(name) is not None)
        if held:
            along = sharding.spec.chunked.get(owner)
            boundary.take_chunks(module, owner, held, None if along is None else along.dim)


def without_sums(sharding: TensorSharding) -> TensorSharding:
    """Return a plan whose gradients are whole on every rank: chunks were summed over ranks."""
    return replace(sharding, spec=replace(sharding.spec, grads={}))


def check_chunks(model: nn.Module, sharding: TensorSharding, *, sequence: bool) -> None:
    """Raise if a plan for as many ranks as there are chunks cannot be computed in chunks.

    Raises:
        ValueError: With the name of the module or parameter.
    """
    spec = sharding.spec
    for fqn, placement in sharding.placements.items():
        _check_parameter(model, fqn, placement, sharding.size)
    for fqn in spec.shared:
        raise _refusal(f"{fqn!r} has fewer heads than chunks ({sharding.size}), which share them")
    for fqn, name in spec.read_whole:
        raise _refusal(f"parts of {f'{fqn}.{name}'!r} are read whole, which are not in chunks")
    for (fqn, attribute), parts in spec.attributes.items():
        if isinstance(parts, int):
            raise _refusal(f"{fqn}.{attribute} does not divide into {sharding.size} chunks")
    for fqn, placement in spec.left.items():
        is_known = linear_kind(model.get_submodule(fqn)) or isinstance(
            model.get_submodule(fqn), nn.Embedding
        )
        if isinstance(placement, Partial) or not is_known:
            raise _refusal(f"what {fqn!r} returns is summed with other partial values")
    for fqn in spec.grads:
        _check_gradient(model, fqn, sharding, sequence=sequence)


def _check_parameter(model: nn.Module, fqn: str, placement: Placement, chunks: int) -> None:
    owner_fqn, _, name = fqn.rpartition(".")
    owner = model.get_submodule(owner_fqn)
    kind = linear_kind(owner)
    if not isinstance(placement, Shard | InterleavedShard):
        return
    if isinstance(owner, nn.Embedding) and placement == Shard(0):
        return  # of all ranks one has a row, and the others add zeros
    if isinstance(owner, nn.Embedding):
        raise _refusal(
            f"{fqn!r} is sharded by its features; tables are computed in chunks of rows"
        )
    if kind is None or name not in ("weight", "bias"):
        raise _refusal(
            f"{fqn!r} is sharded and of a {type(owner).__name__}; linear layers and embeddings "
            "are computed in chunks"
        )
    length, parts = owner.get_parameter(name).shape[placement.dim], parts_of(placement)
    # Of several lengths each is a multiple: the plan is one of as many ranks as there are chunks.
    if isinstance(parts, int) and length % (unit := chunks * parts):
        raise _refusal(
            f"dim {placement.dim} of {fqn!r} has size {length} and needs a multiple of {unit}"
        )


def _check_gradient(
    model: nn.Module, fqn: str, sharding: TensorSharding, *, sequence: bool
) -> None:
    owner = fqn.rpartition(".")[0]
    if _is_row_wise(owner, sharding):
        return
    in_region = any(f"{owner}.".startswith(f"{region}.") for region, _ in sharding.spec.entered)
    is_chunked = owner in sharding.spec.chunked
    of_tokens = sequence and not in_region and not is_chunked
    what = "tokens" if of_tokens else "heads or features"
    if next(model.get_submodule(owner).children(), None) is not None:
        raise _refusal(
            f"{fqn!r} is applied to every rank's own {what} by the forward of {owner!r}, which "
            "calls other modules; put it into a module of its own"
        )
    if not of_tokens and not is_chunked:
        raise _refusal(
            f"{fqn!r} is applied to every rank's own {what}, and in which dim they are was not "
            "found"
        )


def _by_owner(sharding: TensorSharding) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for fqn in sharding.spec.grads:
        owner, _, name = fqn.rpartition(".")
        found.setdefault(owner, []).append(name)
    return found


def _is_row_wise(owner: str, sharding: TensorSharding) -> bool:
    return f"{owner}.weight" in sharding.placements


def _refusal(why: str) -> ValueError:
    return ValueError(
        f"numerics 'invariant': {why}. Leave numerics out of the plan, or choose another "
        "numerics_chunks"
    )
