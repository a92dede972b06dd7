"""A sharding plan as it applies to one model on a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement

from .placements import complete_placements
from .sharding_spec import ShardingSpec, resolve


@dataclass(frozen=True)
class TensorSharding:
    """How the tensors of one model are sharded over tensor-parallel ranks.

    Attributes:
        size: Ranks.
        spec: What the plan says of modules and parameters, by their exact names.
        placements: Of every sharded parameter, biases that the plan does not name included.
    """

    size: int
    spec: ShardingSpec
    placements: Mapping[str, Placement]


def shard(plan: Mapping[str, str], model: nn.Module, size: int) -> TensorSharding:
    """Apply a sharding plan, FQN pattern to placement text, to a model.

    Raises:
        ValueError: If a pattern matches nothing, a placement cannot be read, or a parameter has no
            such dim or does not divide into the ranks.
    """
    spec = resolve(plan, model)
    return TensorSharding(size, spec, complete_placements(spec, model, size))
