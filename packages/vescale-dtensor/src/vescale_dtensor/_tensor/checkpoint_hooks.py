"""The methods by which torch.distributed.checkpoint asks a tensor for its boxes.

torch's checkpoint package takes half a second to import, so what answers is imported when asked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class CheckpointHooks:
    """Mixed into the distributed tensor, before its base."""

    def __create_write_items__(self: Any, fqn: str, object: Any) -> list[Any]:
        """Return what this rank writes to a torch.distributed.checkpoint checkpoint."""
        from .dcp_hooks import dcp_write_items

        return dcp_write_items(self, fqn)

    def __create_chunk_list__(self: Any) -> list[Any]:
        """Return the boxes this rank needs from a torch.distributed.checkpoint checkpoint."""
        from .dcp_hooks import dcp_chunks

        return dcp_chunks(self)

    def __get_tensor_shard__(self: Any, index: Any) -> Tensor:
        """Return the part of the local tensor that one of those boxes is."""
        from .dcp_hooks import dcp_shard

        return dcp_shard(self._settled(alone=True), index)
