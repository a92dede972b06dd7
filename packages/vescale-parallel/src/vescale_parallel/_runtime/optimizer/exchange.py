"""Bring whole tensors to their owners and parts of them back: one all-to-all a dtype and way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import all_to_all

from .owners import Pieces


@dataclass(eq=False, kw_only=True)
class Traveller:
    """A tensor that has an owner.

    Attributes:
        local: This rank's part.
        whole: All of it, to be filled or read; None on ranks that do not own it.
        pieces: What ranks have of it.
        owner: The rank of the stage that owns it.
    """

    local: Tensor
    whole: Tensor | None
    pieces: Pieces
    owner: int


@dataclass(frozen=True)
class Exchange:
    """Moves tensors between the ranks of a stage.

    Attributes:
        mesh: The plan's mesh.
        axes: Those along which the ranks differ.
        rank: This rank among them.
        num_ranks: How many they are.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    rank: int
    num_ranks: int

    def gather(self, tensors: Sequence[Traveller]) -> None:
        """Fill the whole tensors of owners. Every rank must call this."""
        for same in _by_dtype(tensors):
            sent = self._per_rank(
                same,
                lambda each, rank: [each.local] if each.owner == rank else [],
                lambda each, rank: each.pieces.sends(self.rank, rank),
            )
            received = [
                [each for each in self._owned(same) if each.pieces.sends(rank, self.rank)]
                for rank in range(self.num_ranks)
            ]
            rows = self._send(same[0].local, sent, received, lambda each, rank: rank)
            for rank, row in enumerate(rows):
                for each, part in zip(received[rank], row, strict=True):
                    _put(each, rank, part)
            for each in self._owned(same):
                _put(each, self.rank, each.local)

    def scatter(self, tensors: Sequence[Traveller]) -> None:
        """Fill the parts of all ranks from what the owners have. Every rank must call this."""
        for same in _by_dtype(tensors):
            sent = self._per_rank(
                same,
                _part_of,
                lambda each, rank: rank != self.rank and each.owner == self.rank,
            )
            received = [
                [each for each in same if each.owner == rank and rank != self.rank]
                for rank in range(self.num_ranks)
            ]
            rows = self._send(same[0].local, sent, received, lambda each, rank: self.rank)
            for rank, row in enumerate(rows):
                for each, part in zip(received[rank], row, strict=True):
                    each.local.copy_(part)
            for each in self._owned(same):
                if each.whole is not each.local:
                    (part,) = _part_of(each, self.rank)
                    each.local.copy_(part.reshape(each.local.shape))

    def _owned(self, tensors: Iterable[Traveller]) -> list[Traveller]:
        return [each for each in tensors if each.owner == self.rank]

    def _per_rank(
        self,
        tensors: Sequence[Traveller],
        part: Callable[[Traveller, int], list[Tensor]],
        is_sent: Callable[[Traveller, int], bool],
    ) -> list[list[Tensor]]:
        return [
            [
                own.reshape(-1)
                for each in tensors
                if is_sent(each, rank)
                for own in part(each, rank)
            ]
            for rank in range(self.num_ranks)
        ]

    def _send(
        self,
        like: Tensor,
        sent: Sequence[Sequence[Tensor]],
        received: Sequence[Sequence[Traveller]],
        whose: Callable[[Traveller, int], int],
    ) -> list[list[Tensor]]:
        """Return what each rank sent, in the shapes that the ranks ``whose`` says have."""
        shapes = [
            [each.pieces.shapes[whose(each, rank)] for each in row]
            for rank, row in enumerate(received)
        ]
        numels = [[math.prod(shape) for shape in row] for row in shapes]
        parts = [part for row in sent for part in row]
        arrived = all_to_all(
            torch.cat(parts) if parts else like.new_empty(0),
            self.mesh,
            axes=self.axes,
            input_splits=[sum(part.numel() for part in row) for row in sent],
            output_splits=[sum(row) for row in numels],
        )
        flat = iter(arrived.split([numel for row in numels for numel in row]))
        return [[next(flat).view(shape) for shape in row] for row in shapes]


def _by_dtype(tensors: Sequence[Traveller]) -> list[list[Traveller]]:
    groups: dict[torch.dtype, list[Traveller]] = {}
    for each in tensors:
        groups.setdefault(each.local.dtype, []).append(each)
    return list(groups.values())


def _put(each: Traveller, rank: int, part: Tensor) -> None:
    assert each.whole is not None
    for held in each.pieces.boxes[rank]:
        each.whole[held.box.slices].copy_(held.of(part))


def _part_of(each: Traveller, rank: int) -> list[Tensor]:
    """Return what a rank has of a whole tensor, in the order of its elements there."""
    assert each.whole is not None
    boxes = each.pieces.boxes[rank]
    if len(boxes) == 1 and math.prod(each.pieces.shapes[rank]) == boxes[0].box.numel:
        return [each.whole[boxes[0].box.slices]]
    part = each.whole.new_empty(each.pieces.shapes[rank])
    for held in boxes:
        held.of(part).copy_(each.whole[held.box.slices])
    return [part]
