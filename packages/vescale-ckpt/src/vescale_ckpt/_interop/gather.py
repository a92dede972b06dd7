"""Gather: whole tensors on rank 0, for who writes them there one after the other.

[Note: gathering]
``full_tensor()`` would gather over the process groups of the program. Nobody can call other ranks
out of those: one that fails in between, or is interrupted, keeps them waiting until a timeout. So
bytes go where those of saves and loads go, and errors with them, see [Note: told errors]; and
rank 0 alone gets them.

Who sends is what rank 0 sees: the ranks of its mesh. A rank that sees another mesh, one with
another copy for example, sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vescale_ckpt._comm.control_group import AllOrNone, ControlGroup, name_ranks
from vescale_ckpt._comm.transfers import Transfer, exchange, transfers_of
from vescale_ckpt._format.byte_ranges import ByteRanges, Bytes, byte_ranges_of
from vescale_ckpt._io.buffer_pool import Scratch
from vescale_ckpt._io.tensor_bytes import packed_bytes
from vescale_ckpt._save.two_phase_write import boxes_by_rank
from vescale_ckpt._state.local_shards import LocalShard, is_distributed, local_shard_of
from vescale_ckpt.exceptions import MismatchError

# What travels at a time: enough to be worth it, little beside the tensors of large models.
_ROUND_NBYTES = 32 << 20
_NOTHING = np.empty(0, np.uint8)


def gathered(
    names: Sequence[str], tensors: Mapping[str, Tensor], ranks: ControlGroup, scratch: Scratch
) -> dict[str, Tensor]:
    """Return tensors whole in host memory on rank 0, and nothing elsewhere.

    Every rank must call this with the same names, in a block of ``ranks.together()``.

    Args:
        names: Which tensors.
        tensors: Those and others, as this rank has them; of plain ones rank 0's count.
        ranks: All ranks.
        scratch: Memory that may be used from one call to the next.

    Raises:
        CheckpointError: If one has no plain bytes, or is still to be reduced.
        MismatchError: If ranks of one mesh see a tensor placed otherwise.
    """
    with AllOrNone(ranks) as step:
        parts = [_part_of(name, tensors[name], ranks.rank) for name in names]
        step.message = [_asked_for(part, ranks.rank) for part in parts]
    whole: dict[str, Tensor] = {}
    for name, part, texts in zip(names, parts, zip(*step.messages, strict=True), strict=True):
        if texts[0] is None:
            collected = part.local.to("cpu") if ranks.rank == 0 else None
        else:
            _check_same(name, part, texts)
            collected = _collected(part, texts[0], ranks, scratch)
        if collected is not None:
            whole[name] = collected
    return whole


class _Part(NamedTuple):
    """What a rank holds of a tensor.

    Attributes:
        local: This rank's memory, without gradient history.
        shape: Shape of the whole tensor.
        shard: Where it lies in the whole; None for a plain tensor.
    """

    local: Tensor
    shape: tuple[int, ...]
    shard: LocalShard | None

    @property
    def text(self) -> str:
        """What is equal on all ranks that see the same mesh and placements."""
        return "" if self.shard is None else self.shard.layout.text


def _part_of(name: str, tensor: Tensor, rank: int) -> _Part:
    if not is_distributed(tensor):
        return _Part(tensor.detach(), tuple(tensor.shape), None)
    shard = local_shard_of(name, tensor, rank)
    return _Part(shard.local, tuple(shard.shape), shard)


def _asked_for(part: _Part, rank: int) -> str | None:
    """Return what this rank sees; on rank 0 None if it has all of the tensor."""
    if rank == 0 and _is_here(part):
        return None
    return part.text


def _is_here(part: _Part) -> bool:
    """Return whether this rank's memory is all of the tensor, as it is."""
    if part.shard is None:
        return True
    boxes = part.shard.boxes
    return len(boxes) == 1 and boxes[0].box.shape == tuple(part.local.shape) == part.shape


def _check_same(name: str, part: _Part, texts: Sequence[str]) -> None:
    """Refuse another view of the tensor on a rank of the mesh; it would not send its share."""
    if part.shard is None or part.text != texts[0]:
        return  # the ranks of the mesh look after it
    others = [rank for rank in part.shard.layout.mesh_ranks or () if texts[rank] != part.text]
    if others:
        raise MismatchError(
            f"expected the same mesh and placements of {name!r} on all ranks of its mesh, got "
            f"others on {name_ranks(others)}"
        )


def _collected(part: _Part, text: str, ranks: ControlGroup, scratch: Scratch) -> Tensor | None:
    """Send rank 0 this rank's boxes of a tensor; return all of it there. Every rank calls this."""
    shard = part.shard if part.text == text else None
    holders = _ranges_by_rank(part, shard)
    own = holders.pop(ranks.rank, [])
    held = shard.boxes if shard is not None and own else ()
    packed = [_bytes_of(each.of(part.local)) for each in held if each.box.numel]
    whole, memory = None, _NOTHING
    if ranks.rank == 0:
        whole = torch.empty(part.shape, dtype=part.local.dtype, device="cpu")
        memory = _bytes_of(whole)
        for ranges, content in zip(own, packed, strict=True):
            ranges.scatter(content, 0, memory, 0)
    # Only rank 0 receives, and sends itself nothing.
    sent, expected = ({}, holders) if ranks.rank == 0 else ({0: own}, {})

    def pack(transfer: Transfer, content: Bytes) -> None:
        content[:] = packed[transfer.item][transfer.start : transfer.stop]

    nbytes = math.prod(part.shape) * part.local.dtype.itemsize if ranks.size > 1 else 0
    for start in range(0, nbytes, _ROUND_NBYTES):
        outgoing, incoming = (_transfers(of, start) for of in (sent, expected))
        for transfer, content in exchange(outgoing, incoming, pack, ranks, scratch.take):
            holders[transfer.peer][transfer.item].scatter(content, transfer.start, memory, 0)
    return whole


def _ranges_by_rank(part: _Part, shard: LocalShard | None) -> dict[int, list[ByteRanges]]:
    """Return where the boxes of each rank lie in the whole tensor, those of copies left out."""
    if shard is None:
        return {}
    itemsize = part.local.dtype.itemsize
    return {
        rank: [byte_ranges_of(part.shape, box, itemsize) for box in boxes if box.numel]
        for rank, boxes in boxes_by_rank(shard.layout, part.shape).items()
    }


def _transfers(by_peer: Mapping[int, Sequence[ByteRanges]], start: int) -> Iterator[Transfer]:
    """Yield what goes to or comes from each rank of the round that begins at a byte."""
    for peer, boxes in by_peer.items():
        yield from transfers_of(0, peer, boxes, start, start + _ROUND_NBYTES)


def _bytes_of(tensor: Tensor) -> Bytes:
    return np.asarray(packed_bytes(tensor))
