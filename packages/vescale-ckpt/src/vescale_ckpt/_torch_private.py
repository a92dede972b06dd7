"""The private parts of torch that this package uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

# torch 2.11 to 2.13: documented, but not in the module's __all__.
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.tensor import DTensor

# torch 2.11 to 2.13: FSDP2 over tensor parallel gives its parameters this placement; without
# it such parameters could not be saved at all.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # pyright: ignore[reportPrivateUsage]

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the shape, mesh and placements of a DTensor in one object.

    torch 2.11 to 2.13. The properties of a DTensor say the same, at six times the cost, which
    is a tenth of what a load of very many tensors has to compute.
    """
    return tensor._spec  # pyright: ignore[reportPrivateUsage]


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the store of a process group, by a connection of its own."""
    # torch 2.11 to 2.13: documented, but the stubs lack it.
    return group.get_group_store().clone()  # pyright: ignore[reportAttributeAccessIssue]


def prefixed(prefix: str, store: Store) -> Store:
    """Return a store that keeps its keys apart from those of others."""
    return PrefixStore(prefix, store)


__all__ = ["Store", "StridedShard", "prefixed", "spec_of", "store_of"]
