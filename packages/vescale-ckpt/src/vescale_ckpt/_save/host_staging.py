"""Host staging: a copy of what this rank holds, which a save writes while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from vescale_ckpt._state.local_shards import LocalShard

from .save import Snapshot

_ALIGNMENT = 64
_MIN_PIECE_NBYTES = 1 << 20


class HostStaging:
    """Host memory that holds a copy of this rank's shards.

    [Note: pieces]
    torch rounds each piece of pinned memory up to a power of two: 4.1 GB would take 8. So there
    are several, whose lengths are powers of two by themselves, long ones first.
    """

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        # Where the tensors of the last save lie in them, by their identities.
        self._places: dict[Any, torch.Tensor] = {}

    def copy(self, taken: Snapshot) -> Snapshot:
        """Return a snapshot whose tensors lie in this memory; overwrites the one before."""
        identities = {
            key: shard.identity for key, shard in taken.shards.items() if _is_needed(shard)
        }
        sources: dict[Any, torch.Tensor] = {}
        for key, identity in identities.items():
            if identity is not None:
                sources.setdefault(identity, taken.shards[key].local)
        on_gpu = any(source.is_cuda for source in sources.values())
        if sources.keys() != self._places.keys():
            self._places = self._laid_out(sources, pin_memory=on_gpu)
        for identity, source in sources.items():
            self._places[identity].copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        shards = {
            key: _placed(shard, self._places.get(identities[key]))
            if key in identities
            else _emptied(shard)
            for key, shard in taken.shards.items()
        }
        return Snapshot(taken.encoded, shards)

    def _laid_out(
        self, sources: Mapping[Any, torch.Tensor], *, pin_memory: bool
    ) -> dict[Any, torch.Tensor]:
        """Return memory for each tensor, side by side; allocate more if there is too little."""
        nbytes = [_aligned(source.nbytes) for source in sources.values()]
        lengths, starts = in_pieces(nbytes) if pin_memory else _in_one_piece(nbytes)
        fits = len(self._pieces) >= len(lengths) and all(
            held.numel() >= length and (held.is_pinned() or not pin_memory)
            for held, length in zip(self._pieces, lengths, strict=False)
        )
        if not fits:
            self._places = {}
            self._pieces = []
            self._pieces = [
                torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
                for length in lengths
            ]
        places: dict[Any, torch.Tensor] = {}
        for (identity, source), (number, start) in zip(sources.items(), starts, strict=True):
            flat = self._pieces[number][start : start + source.nbytes].view(source.dtype)
            places[identity] = flat.view(source.shape)
        return places


def _in_one_piece(lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the length of one piece of memory, and where in it everything starts."""
    stops = [*accumulate(lengths)]
    return stops[-1:], [(0, stop - n) for stop, n in zip(stops, lengths, strict=True)]


def in_pieces(lengths: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the lengths of pieces of memory, and in which of them, and where, everything starts.

    See [Note: pieces].
    """
    pieces: list[int] = []
    starts: list[tuple[int, int]] = []
    filled, left = 0, sum(lengths)
    for length in lengths:
        if not pieces or filled + length > pieces[-1]:
            # The largest power of two that is filled, or the smallest for what comes next.
            longest = 1 << (max(left, 1).bit_length() - 1)
            pieces.append(max(longest, 1 << max(length - 1, 0).bit_length(), _MIN_PIECE_NBYTES))
            filled = 0
        starts.append((len(pieces) - 1, filled))
        filled += length
        left -= length
    return pieces, starts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _is_needed(shard: LocalShard) -> bool:
    # What every rank holds whole is compared, and written by all together.
    return shard.layout.is_first_replica or shard.layout.is_whole


def _placed(shard: LocalShard, copy: torch.Tensor | None) -> LocalShard:
    return shard if copy is None else shard._replace(local=copy)


def _emptied(shard: LocalShard) -> LocalShard:
    """Return a shard that others write, without its memory."""
    if not shard.local.numel():
        return shard
    return shard._replace(local=shard.local.new_empty(0), layout=replace(shard.layout, boxes=()))
