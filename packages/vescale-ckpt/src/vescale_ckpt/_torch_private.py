"""The private parts of torch that this package uses."""

from __future__ import annotations

# torch 2.11 to 2.13: FSDP2 over tensor parallel gives its parameters this placement; without
# it such parameters could not be saved at all.
from torch.distributed.tensor.placement_types import (
    _StridedShard as StridedShard,  # pyright: ignore[reportPrivateUsage]
)

__all__ = ["StridedShard"]
