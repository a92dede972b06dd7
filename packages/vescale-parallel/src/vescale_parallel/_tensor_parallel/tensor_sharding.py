"""A sharding plan as it applies to one model on a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import stack_of
from vescale_parallel._model.linear_layout import linear_kind

from .chunks import Parts, parts_of
from .placements import complete_placements
from .sharding_spec import ShardingSpec, resolve


@dataclass(frozen=True)
class TensorSharding:
    """How the tensors of one model are sharded over tensor-parallel ranks.

    Attributes:
        size: Ranks.
        spec: What the plan says of modules and parameters, by their exact names.
        placements: Of every sharded parameter, biases that the plan does not name included.
        input_blocks: By module, the blocks that the inputs of its linear layers are divided into,
            of each of which a rank has a part: of those layers whose inputs ranks have parts of.
        in_forward: Whether the first and the last block of a stack shard and gather a sequence
            within their forwards, around which other ranks slice it.
    """

    size: int
    spec: ShardingSpec
    placements: Mapping[str, Placement]
    input_blocks: Mapping[str, frozenset[Parts]] = field(
        default_factory=dict[str, "frozenset[Parts]"]
    )
    in_forward: bool = False

    def sequence_ends(self) -> dict[str, tuple[str, str]]:
        """Return, of every stack of blocks, which shards the sequence and which gathers it."""
        found: dict[str, tuple[str, str]] = {}
        lasts = {
            stack_of(fqn): fqn
            for fqn, move in self.spec.outputs.items()
            if move.source == Shard(1) and move.target == Replicate()
        }
        for (fqn, _), move in self.spec.inputs.items():
            stack = stack_of(fqn)
            if move.source == Replicate() and move.target == Shard(1) and stack in lasts:
                found[stack] = (fqn, lasts[stack])
        return found


def shard(plan: Mapping[str, str], model: nn.Module, size: int) -> TensorSharding:
    """Apply a sharding plan, FQN pattern to placement text, to a model.

    Raises:
        ValueError: If a pattern matches nothing, a placement cannot be read, or a parameter has no
            such dim or does not divide into the ranks.
    """
    spec = resolve(plan, model)
    placements = complete_placements(spec, model, size)
    return TensorSharding(size, spec, placements, _input_blocks(model, placements))


def _input_blocks(
    model: nn.Module, placements: Mapping[str, Placement]
) -> dict[str, frozenset[Parts]]:
    found: dict[str, frozenset[Parts]] = {}
    for fqn, placement in placements.items():
        owner, _, name = fqn.rpartition(".")
        kind = linear_kind(model.get_submodule(owner)) if name == "weight" else None
        if kind is None or not isinstance(placement, Shard | InterleavedShard):
            continue
        if placement.dim == kind.in_dim:
            holder = owner.rpartition(".")[0]
            found[holder] = found.get(holder, frozenset[Parts]()) | {parts_of(placement)}
    return found
