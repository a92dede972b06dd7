"""What torch.distributed.checkpoint asks a tensor: which boxes it has.

torch's own answer is one box a rank; a part of an interleaved or flattened cut is several.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor as torch_dtensor
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Partial

from vescale_dtensor._comm.emulation import coordinate_of
from vescale_dtensor._layout.boxes import LocalBox, local_boxes

from .watched_memory import handed_out


def dcp_write_items(tensor: torch_dtensor.DTensor, fqn: str) -> list[WriteItem]:
    """Return one write item per box; torch drops those that other ranks have, too."""
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in dcp_chunks(tensor)
    ]


def dcp_chunks(tensor: torch_dtensor.DTensor) -> list[ChunkStorageMetadata]:
    """Return the boxes this rank has."""
    return [
        ChunkStorageMetadata(torch.Size(held.box.offset), torch.Size(held.box.shape))
        for held in _boxes(tensor)
    ]


def dcp_shard(tensor: torch_dtensor.DTensor, index: Any) -> Tensor:
    """Return the part of the local tensor whose box begins at ``index.offset``."""
    local = handed_out(tensor._local_tensor.detach())
    for held in _boxes(tensor):
        if index.offset is None or torch.Size(held.box.offset) == index.offset:
            return held.of(local)
    raise ValueError(f"expected the offset of a box of this rank, got {index}")


def _boxes(tensor: torch_dtensor.DTensor) -> tuple[LocalBox, ...]:
    mesh = tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"expected no pending reduction in a checkpoint, got {tensor.placements}")
    return local_boxes(tensor.shape, mesh.shape, coordinate_of(mesh), tensor.placements)
