"""How what hooks are given lies over tensor-parallel ranks: found by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import generalize
from vescale_parallel._tensor_parallel.chunks import (
    Parts,
    lengths_within,
    number_or_lengths,
    parts_of,
)
from vescale_parallel._tensor_parallel.hooks.axis import Slot
from vescale_parallel._tensor_parallel.hooks.whole_activations import Layout, Layouts
from vescale_parallel._tensor_parallel.shard_module import placement_between, rank_part
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._verify.compared_results import close, largest_of
from vescale_parallel._verify.compared_runs import heard
from vescale_parallel._verify.region import Region

from .seen_activations import SeenActivations, judged, like_blocks


def layouts_of(
    make: Callable[[], Region],
    sharding: TensorSharding,
    *,
    fqns: Iterable[str],
    backward: Iterable[str],
    real: TensorSharding,
) -> Layouts:
    """Return how what hooks are given lies over ranks.

    Args:
        make: Returns a model as a region to be run.
        sharding: Its plan.
        fqns: Modules with hooks.
        backward: Those with backward hooks.
        real: The plan of the model that was scaled down, or the same one.

    Raises:
        Contradiction: If a rank's part raises.
        DryRunError: If the model cannot be run.
    """
    asked, asked_backward = {*fqns}, {*backward}

    def listener(region: Region, *, is_whole: bool) -> SeenActivations:
        names = [fqn for fqn, _ in region.module.named_modules()]
        return SeenActivations(like_blocks(asked, names), like_blocks(asked_backward, names))

    packed = packed_parts(sharding, real)

    def judge(
        whole: Tensor, parts: Sequence[Tensor], grads: Sequence[Tensor | None], slot: Slot
    ) -> Layout | None:
        return layout_of(whole, parts, grads, packed)

    return judged(asked, *heard(make, sharding, listener), judge)


def packed_parts(sharding: TensorSharding, real: TensorSharding) -> dict[Parts, Parts]:
    """Return of what parts dims are made that are sharded each on its own: run, and real."""
    of_real = {generalize(fqn): parts_of(each) for fqn, each in real.placements.items()}
    found = {
        parts_of(each): of_real.get(generalize(fqn), parts_of(each))
        for fqn, each in sharding.placements.items()
    }
    return {run: there for run, there in found.items() if run != 1}


def layout_of(
    whole: Tensor,
    parts: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    packed: Mapping[Parts, Parts],
) -> Layout | None:
    """Return how a leaf lies, given its gradient on one device and on every rank."""
    value = _placement(whole, parts, packed)
    if value is None:
        return None
    gradient = Replicate() if value == Partial() else value
    if any(grad is not None and bool(grad.any()) for grad in grads):
        zeros = (whole, *parts)
        given = [
            torch.zeros_like(z) if g is None else g for g, z in zip(grads, zeros, strict=True)
        ]
        found = _placement(given[0], given[1:], packed)
        if found is None:
            return None
        gradient = found
    layout = Layout(_real(value, packed), _real(gradient, packed))
    return layout if layout.is_known else None


def _real(placement: Placement, packed: Mapping[Parts, Parts]) -> Placement:
    if not isinstance(placement, InterleavedShard):
        return placement
    return InterleavedShard(placement.dim, packed[placement.parts])


def _placement(
    whole: Tensor, parts: Sequence[Tensor], packed: Mapping[Parts, Parts]
) -> Placement | None:
    """Return how a tensor lies over ranks; None if in no way that is known."""
    largest, size = largest_of(whole), len(parts)
    if all(part.shape == whole.shape for part in parts):
        if all(close(part, whole, largest) for part in parts):
            return Replicate()
        is_sum = whole.is_floating_point() and close(torch.stack([*parts]).sum(0), whole, largest)
        return Partial() if is_sum else None
    shard = placement_between(whole, parts[0], size)
    if not isinstance(shard, Shard):
        return None
    for candidate, fits in ((shard, shard), *_of_parts(shard.dim, whole, packed)):
        shards = [rank_part(whole, fits, size, rank) for rank in range(size)]
        if all(close(one, other, largest) for one, other in zip(parts, shards, strict=True)):
            return candidate
    return None


def _of_parts(
    dim: int, whole: Tensor, packed: Mapping[Parts, Parts]
) -> Iterable[tuple[Placement, Placement]]:
    """Yield placements of a dim that is made of parts; and the same, by its length here."""
    length = whole.shape[dim]
    for parts in packed:
        lengths = lengths_within(parts, length)
        if sum(lengths) == length and min(lengths) > 0:
            here = number_or_lengths(lengths)
            yield InterleavedShard(dim, parts), InterleavedShard(dim, here)
