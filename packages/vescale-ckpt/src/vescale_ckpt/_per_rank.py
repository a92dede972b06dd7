"""Values that every rank has its own of.

[Note: per-rank tensors]
A tensor of which each rank has its own is stored as one tensor with a leading dim of the number
of ranks, of which every rank holds a row. So it is written, checked and read like any tensor
that is sharded over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch.distributed.tensor import Shard

from vescale_dtensor import Box, LocalBox

from ._boxes import Layout, Part, part_of
from ._group import Ranks, Step
from ._tensor_bytes import packed_chunks
from .exceptions import CheckpointError


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value of a state of which every rank has its own, such as the state of a generator.

    It is saved for every rank, and loaded on the rank of the same number. If the number of ranks
    has changed, it is an error, unless all ranks had the same value: then every rank gets that.
    ``load(strict=False)`` leaves the value as it is instead.

    Attributes:
        value: Anything that a state may contain but DTensors: tensors of the same shape and
            dtype on every rank, Python values, objects with ``state_dict()``.
        strict: Whether that is an error; if not, the value stays as it is, with a warning.
    """

    value: Any
    strict: bool = True


def stacked_part(key: str, tensor: torch.Tensor, ranks: Ranks) -> Part:
    """Return this rank's part of the tensor in which the tensors of all ranks are stacked.

    Raises:
        CheckpointError: If it is a DTensor, or has no plain bytes.
    """
    part = part_of(key, tensor, ranks.rank)
    if part.layout.mesh_ranks is not None:
        raise CheckpointError(f"{key!r} is a DTensor, which has no place in PerRank")
    shape = (ranks.size, *part.shape)
    layout = Layout(
        boxes=(_row(shape, ranks.rank),),
        is_first_replica=True,
        is_whole=False,
        mesh_ranks=tuple(range(ranks.size)),
        mesh_shape=(ranks.size,),
        placements=(Shard(0),),
        text=f"per rank of {ranks.size}",
    )
    return Part(shape, part.dtype, part.local[None], layout)


def row_part(part: Part, shape: tuple[int, ...], row: int) -> Part:
    """Return the part that fills a plain tensor from one row of a stacked one of ``shape``."""
    layout = replace(part.layout, boxes=(_row(shape, row),))
    return Part(shape, part.dtype, part.local[None], layout)


def _row(shape: tuple[int, ...], row: int) -> LocalBox:
    dims = len(shape) - 1
    return LocalBox(Box((row, *(0,) * dims), (1, *shape[1:])), (0,) * (dims + 1))


def collect(
    nodes: Mapping[str, list[Any]],
    tensors: Mapping[str, list[str]],
    parts: Mapping[str, Part],
    ranks: Ranks,
) -> None:
    """Exchange the values of all ranks. Every rank must call this.

    Args:
        nodes: For each key, a list with this rank's value as tagged JSON. It gets the values of
            all ranks, or stays as it is if all have the same.
        tensors: For each key, the keys of the tensors in its value.
        parts: This rank's part of each tensor.
        ranks: All ranks.
    """
    if not nodes:
        return
    with Step(ranks) as step:
        step.message = {
            key: [node[0], [_digest(parts[name]) for name in tensors[key]]]
            for key, node in nodes.items()
        }
    for key, node in nodes.items():
        values = [message[key] for message in step.messages]
        if any(value != values[0] for value in values):
            node[:] = [value[0] for value in values]


def _digest(part: Part) -> str:
    digest = sha256()
    for chunk in packed_chunks(part.local):
        digest.update(chunk)
    return digest.hexdigest()
