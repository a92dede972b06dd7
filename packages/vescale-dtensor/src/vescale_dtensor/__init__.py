"""Distributed tensors: where the elements are, and operators that never lie about them."""

from ._collectives import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    reduce_scatter as reduce_scatter,
)
from ._dispatch import GatherWarning as GatherWarning
from ._dtensor import DTensor as DTensor, distribute_tensor as distribute_tensor
from ._failures import (
    PeerError as PeerError,
    announced_failures as announced_failures,
    named_failures as named_failures,
)
from ._layout import (
    Box as Box,
    LocalBox as LocalBox,
    local_boxes as local_boxes,
    local_shape as local_shape,
)
from ._placements import (
    InterleavedShard as InterleavedShard,
    RaggedShard as RaggedShard,
    is_sharded as is_sharded,
)
from ._register import register_rules, register_with_torch

__version__ = "0.1.0"
__all__ = [
    "Box",
    "DTensor",
    "GatherWarning",
    "InterleavedShard",
    "LocalBox",
    "PeerError",
    "RaggedShard",
    "all_gather",
    "all_reduce",
    "announced_failures",
    "distribute_tensor",
    "is_sharded",
    "local_boxes",
    "local_shape",
    "named_failures",
    "reduce_scatter",
]

register_rules()
register_with_torch()
