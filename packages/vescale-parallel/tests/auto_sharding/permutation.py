"""The permutation certificate: an axis may be cut if its elements may change places.

A cut gives every rank some elements of an axis, in every parameter at once. If the model's
function stays the same when those elements change places everywhere, each element's part is
computed alone, and it is right to compute it elsewhere. Nothing here knows any operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._auto_sharding.find_candidates import Candidate

from .masked_ranks import packed, shared_parts


def randomize(model: nn.Module) -> None:
    """Fill a model with random weights that keep activations of order one, in float64."""
    generator = torch.Generator().manual_seed(0)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(1 + noise / 4)


def permutation(length: int) -> torch.Tensor:
    """Return an order of elements that differs from the natural one."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    return order if not torch.equal(order, torch.arange(length)) else order.flip(0)


def permute(
    parameter: torch.Tensor,
    placement: Placement,
    length: int,
    order: torch.Tensor,
    shared: torch.Tensor,
) -> None:
    """Reorder, in place, the axis of ``length`` elements that a placement would cut.

    ``shared`` are the elements of parts that do not have it.
    """
    assert isinstance(placement, Shard | InterleavedShard)
    dim = placement.dim
    with torch.no_grad():
        pairs = zip(packed(parameter, placement), packed(shared, placement), strict=True)
        for part in (part for part, each in pairs if not each.all()):
            apart = part.unflatten(dim, (length, -1))
            part.copy_(apart.index_select(dim, order).flatten(dim, dim + 1))


def change(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    cut: Candidate,
    names: Iterable[str],
    before: torch.Tensor,
) -> float:
    """Return how much an output differs from before when some of a cut's parameters are permuted.

    Relative to the output's standard deviation; parameters are as before afterwards.
    """
    order, placements = permutation(cut.length), {**cut.parameters, **of_norms(model, cut)}
    distinct = {id(p): (p, n) for n in names for p in [model.get_parameter(n)]}
    saved = [(parameter, parameter.detach().clone()) for parameter, _ in distinct.values()]
    for parameter, name in distinct.values():
        shared = shared_parts(replace(cut, parameters=placements), name, parameter)
        permute(parameter, placements[name], cut.length, order, shared)
    after = run()
    with torch.no_grad():
        for parameter, old in saved:
            parameter.copy_(old)
    return ((after - before).abs().max() / before.std()).item()


def of_norms(model: nn.Module, cut: Candidate) -> dict[str, Placement]:
    """Return where the axis is in parameters of modules that are called with all of it."""
    return {
        f"{fqn}.{name}": Shard(0)
        for fqn in cut.whole
        for name, parameter in model.get_submodule(fqn).named_parameters()
        if parameter.dim() == 1
    }


def is_numbered(model: nn.Module, cut: Candidate) -> bool:
    """Whether buffers or arguments have other values for other elements of a cut's axis."""
    buffers = dict(model.named_buffers())
    read = [each for each in cut.reads if ".".join(each) in buffers]
    return bool(cut.slices or read)


def matrices(model: nn.Module, cut: Candidate) -> list[str]:
    """Return the cut's parameters with at least two dimensions, tied ones once."""
    found = {id(p): n for n in cut.parameters for p in [model.get_parameter(n)] if p.dim() > 1}
    return list(found.values())
