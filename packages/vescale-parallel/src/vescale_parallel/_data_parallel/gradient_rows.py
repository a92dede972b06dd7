"""Gradients that are reduced together, in a buffer that they are written to and sent from.

[Note: buffers of gradients] A gradient is copied once, as soon as autograd has it or when its
group of parameters is reduced. What it is copied to is sent as it is. The mean of copies comes
back into the same buffer, and ``.grad`` is a view of it; of shards a rank keeps the mean of its
own row. A buffer is used again once nobody but its owner holds a view of it: a gradient that a
loop keeps, or that another backward pass is added to, stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import all_gather, all_reduce, all_to_all, ordered_sum
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._torch_private import foreach_copy_, foreach_zero_, num_views

from .shard_rows import RowLayout, tag_of

# Says whose rows arrived, given what came and what was expected.
Look = Callable[[Tensor, Tensor], None]


@dataclass(eq=False)
class RowBuffer:
    """Memory of gradients.

    Attributes:
        rows: (ranks, row) of gradients, or one row of their sums.
        pieces: Views of every parameter's places in rows.
        tags: A view of what tells rows of one group of parameters from those of others.
        number: The group of parameters whose tag it has.
        is_busy: Whether it is being written to.
        is_recent: Whether it was used since the last :meth:`GradientBuffers.trim`.
    """

    rows: Tensor
    pieces: list[list[Tensor]]
    tags: Tensor
    number: int = -1
    is_busy: bool = False
    is_recent: bool = True

    def __post_init__(self) -> None:
        self._own_views = num_views(self.rows)

    @property
    def is_free(self) -> bool:
        """Whether nobody reads it or writes to it."""
        return not self.is_busy and num_views(self.rows) == self._own_views


@dataclass(eq=False)
class GradientBuffers:
    """The buffers of a model's gradients.

    They outlive a step on a CPU, where memory that is freed comes back in pieces. CUDA's allocator
    gives back what it was given: :meth:`trim` leaves it all of its buffers that nobody uses.
    """

    _rows: dict[tuple[RowLayout, torch.dtype, torch.device], list[RowBuffer]] = field(
        default_factory=dict[tuple[RowLayout, torch.dtype, torch.device], list[RowBuffer]]
    )
    _sums: dict[tuple[int, torch.dtype, torch.device], list[RowBuffer]] = field(
        default_factory=dict[tuple[int, torch.dtype, torch.device], list[RowBuffer]]
    )
    _received: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = field(
        default_factory=dict[tuple[torch.Size, torch.dtype, torch.device], Tensor]
    )

    def rows(self, layout: RowLayout, like: Tensor, dtype: torch.dtype) -> RowBuffer:
        """Return rows to write gradients to, on the device of ``like``; they are busy then."""
        held = self._rows.setdefault((layout, dtype, like.device), [])
        found = next((each for each in held if each.is_free), None)
        if found is None:
            rows = like.new_zeros(layout.ranks, layout.row, dtype=dtype)
            found = RowBuffer(rows, layout.pieces_of_rows(rows), rows[:, layout.starts[-1] :])
            held.append(found)
        found.is_busy = found.is_recent = True
        return found

    def sum(self, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1-D memory for a sum that is kept."""
        held = self._sums.setdefault((numel, dtype, like.device), [])
        found = next((each for each in held if each.is_free), None)
        if found is None:
            flat = like.new_empty(numel, dtype=dtype)
            found = RowBuffer(flat, [], flat)
            held.append(found)
        found.is_recent = True
        return found.rows.detach()

    def received(self, like: Tensor) -> Tensor:
        """Return memory of a tensor's shape and dtype, for use until the next call."""
        key = like.shape, like.dtype, like.device
        if key not in self._received:
            views = {at: each for at, each in self._received.items() if at[1:] == key[1:]}
            numel = max([like.numel(), *(each.numel() for each in views.values())])
            flat = like.new_empty(numel)
            for shape, *_ in (*views, key):
                self._received[shape, *key[1:]] = flat[: shape.numel()].view(shape)
        return self._received[key]

    def trim(self) -> None:
        """Let go of what was not needed since the last call, and of all that is not on a CPU."""
        for held in (*self._rows.values(), *self._sums.values()):
            held[:] = [each for each in held if each.is_recent and _is_kept(each.rows)]
            for each in held:
                each.is_recent = False
        self._received = {key: each for key, each in self._received.items() if _is_kept(each)}


def _is_kept(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class GradientRows:
    """The gradients of some parameters of a group: of the same dtypes, all cut or all copies.

    Args:
        params: The parameters.
        layout: Where they are in a row; one row if all ranks have copies.
        dtype: In which they are summed.
        number: That of the group of parameters.
        buffers: Of the model.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        layout: RowLayout,
        dtype: torch.dtype,
        number: int,
        buffers: GradientBuffers,
    ) -> None:
        self.params, self.layout, self.dtype = params, layout, dtype
        self._number, self._buffers = number, buffers
        self._index = {param: index for index, param in enumerate(params)}
        self._buffer: RowBuffer | None = None
        self._written: set[int] = set()
        self._tags: Tensor | None = None

    def add(self, param: ShardedParameter, grad: Tensor) -> None:
        """Add a gradient to what is there of the parameter."""
        index = self._index[param]
        targets = self._targets(param)[index]
        sources = self.layout.pieces_of_whole(index, grad)
        for target, source in zip(targets, sources, strict=True):
            if index in self._written:
                target.add_(source)
            else:
                target.copy_(source)
        self._written.add(index)

    def write(self, grads: Mapping[ShardedParameter, Tensor]) -> None:
        """Write, or add, gradients of some of the parameters; leave zeros where there is none."""
        fresh: tuple[list[Tensor], list[Tensor]] = [], []
        for param, grad in grads.items():
            index = self._index[param]
            if index in self._written:
                self.add(param, grad)
                continue
            fresh[0].extend(self._targets(param)[index])
            fresh[1].extend(self.layout.pieces_of_whole(index, grad))
            self._written.add(index)
        if fresh[0]:
            foreach_copy_(*fresh)
        targets = self._targets(self.params[0])
        missing = [
            target
            for index in range(len(self.params))
            if index not in self._written
            for target in targets[index]
        ]
        if missing:
            foreach_zero_(missing)

    def drop(self, param: ShardedParameter) -> None:
        """Drop what was written of one parameter."""
        self._written.discard(self._index[param])
        if not self._written:
            self.forget()

    def forget(self) -> None:
        """Drop what was written."""
        if self._buffer is not None:
            self._buffer.is_busy = False
        self._buffer = None
        self._written.clear()

    def mean(
        self, shards: dist.ProcessGroup | None, copies: dist.ProcessGroup | None, look: Look
    ) -> Tensor:
        """Sum over ranks in rank order; return the mean, of this rank's row, and forget.

        Args:
            shards: The ranks with shards of the parameters.
            copies: The ranks with copies of those.
            look: Is told whose rows arrived.
        """
        assert self._buffer is not None
        rows, dtype = self._buffer.rows, self.params[0].local.dtype
        num_ranks = _size(shards) * _size(copies)
        if self.layout.ranks > 1:
            assert shards is not None
            received = self._buffers.received(rows)
            all_to_all(rows, shards, out=received)
            look(received[:, -1], self._expected_tags())
            own = ordered_sum(received, out=received[0])
            if copies is not None:
                own = all_reduce(own, copies)
            kept = self._buffers.sum(own.numel(), own, dtype)
            torch.div(own if own.dtype == dtype else own.to(dtype), num_ranks, out=kept)
        else:
            kept = rows[0]
            divides = self.dtype == dtype  # a shard of the sum, before all have it
            for group in (shards, copies):
                if group is not None:
                    is_last = group is (shards if copies is None else copies)
                    self._all_reduce(kept, group, num_ranks if is_last and divides else 1)
            if not divides:
                kept = kept.to(dtype) / num_ranks
        self.forget()
        return kept

    def _all_reduce(self, row: Tensor, group: dist.ProcessGroup, divisor: int) -> None:
        """Sum a row over ranks in rank order, in its own memory, and divide it."""
        chunks = row.view(group.size(), -1)
        received = self._buffers.received(chunks)
        all_to_all(chunks, group, out=received)
        own = ordered_sum(received, out=received[0])
        if divisor > 1:
            own.div_(divisor)
        all_gather(own, group, out=chunks)

    def _targets(self, param: ShardedParameter) -> list[list[Tensor]]:
        if self._buffer is None:
            self._buffer = self._buffers.rows(self.layout, param.local, self.dtype)
            if self.layout.ranks > 1 and self._buffer.number != self._number:
                self._buffer.number = self._number
                self._buffer.tags.fill_(tag_of(self._number))
        return self._buffer.pieces

    def _expected_tags(self) -> Tensor:
        if self._tags is None:
            like = self.params[0].local
            self._tags = like.new_full(
                (self.layout.ranks,), tag_of(self._number), dtype=self.dtype
            )
        return self._tags


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()
