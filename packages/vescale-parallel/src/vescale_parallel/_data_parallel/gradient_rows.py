"""Gradients that are reduced together, in a buffer that they are written to and sent from.

[Note: buffers of gradients] A gradient is copied once, as soon as autograd has it or when its
group of parameters is reduced. What it is copied to is sent as it is, a row to each rank. The
mean of copies comes back into the same buffer, and ``.grad`` is a view of it; of shards a rank
keeps the mean of its own row. What arrives to be added in rank order is as large as what is sent,
for a row of each rank comes: all gradients of a group, however many ranks, and groups follow each
other in one such buffer. A buffer is used again once nobody but its owner holds a view of
it: a gradient that a loop keeps, or that another backward pass is added to, stays what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import (
    CollectiveWork,
    ordered_sum,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from vescale_parallel._parameters.flat_layout import FlatLayout
from vescale_parallel._parameters.host_memory import empty_on_host
from vescale_parallel._parameters.memory_layout import Stride, strided
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._torch_private import foreach_copy_, foreach_zero_, num_views

from .reductions import ReductionOrder

T = TypeVar("T")
Started = Generator[CollectiveWork | None, None, T]


@dataclass(eq=False)
class RowBuffer:
    """Memory of gradients.

    Attributes:
        rows: (ranks, row) of gradients, or one row of their sums.
        pieces: Views of the parameters that were written to it, by layout and place.
        is_busy: Whether it is being written to.
        is_recent: Whether it was used since the last :meth:`GradientBuffers.trim`.
    """

    rows: Tensor
    pieces: dict[tuple[FlatLayout, int, Stride | None], Tensor] = field(
        default_factory=dict[tuple[FlatLayout, int, Stride | None], Tensor]
    )
    is_busy: bool = False
    is_recent: bool = True

    def __post_init__(self) -> None:
        self._own_views = num_views(self.rows)

    @property
    def is_free(self) -> bool:
        """Whether nobody reads it or writes to it."""
        return not self.is_busy and num_views(self.rows) == self._own_views

    def piece(
        self, layout: FlatLayout, place: int, shape: torch.Size, stride: Stride | None
    ) -> Tensor:
        """Return the view of a parameter, made once: to make one is an operator."""
        key = layout, place, stride
        if key not in self.pieces:
            where = layout.in_whole(place, shape.numel())
            self.pieces[key] = strided(self.rows.view(-1)[where], shape, stride)
            self._own_views += 1
        return self.pieces[key]


@dataclass(eq=False)
class ReceivedBuffer:
    """Memory that gradients of others arrive in, of any shape."""

    is_busy: bool = False
    _views: dict[torch.Size, Tensor] = field(default_factory=dict[torch.Size, Tensor])

    def view(self, like: Tensor) -> Tensor:
        """Return memory of a tensor's shape, dtype and device."""
        if like.shape not in self._views:
            shapes = (*self._views, like.shape)
            flat = like.new_empty(max(shape.numel() for shape in shapes))
            self._views = {shape: flat[: shape.numel()].view(shape) for shape in shapes}
        return self._views[like.shape]


@dataclass(eq=False)
class GradientBuffers:
    """The buffers of a model's gradients.

    They outlive a step on a CPU, where memory that is freed comes back in pieces. CUDA's allocator
    gives back what it was given: :meth:`trim` leaves it all of its buffers that nobody uses. So it
    does where gradients of micro-batches are added up before they are written here: buffers that
    lay idle meanwhile would be their memory once more.

    Attributes:
        on_host: Whether sums are kept on the host.
        outlive_steps: Whether they do so on a CPU.
    """

    on_host: bool = False
    outlive_steps: bool = True
    _rows: dict[tuple[int, int, torch.dtype, torch.device], list[RowBuffer]] = field(
        default_factory=dict[tuple[int, int, torch.dtype, torch.device], list[RowBuffer]]
    )
    _sums: dict[tuple[int, torch.dtype, torch.device | None], list[RowBuffer]] = field(
        default_factory=dict[tuple[int, torch.dtype, torch.device | None], list[RowBuffer]]
    )
    _received: dict[tuple[torch.dtype, torch.device], list[ReceivedBuffer]] = field(
        default_factory=dict[tuple[torch.dtype, torch.device], list[ReceivedBuffer]]
    )

    def rows(self, layout: FlatLayout, like: Tensor, dtype: torch.dtype) -> RowBuffer:
        """Return rows to write gradients to, on the device of ``like``; they are busy then."""
        shape = layout.ranks, layout.shard
        held = self._rows.setdefault((*shape, dtype, like.device), [])
        found = next((each for each in held if each.is_free), None)
        if found is None:
            # Padding is sent, too, and must not be signalling NaNs.
            found = RowBuffer(like.new_zeros(shape, dtype=dtype))
            held.append(found)
        found.is_busy = found.is_recent = True
        return found

    def sum(self, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1-D memory for a sum that is kept."""
        held = self._sums.setdefault((numel, dtype, like.device), [])
        return _free(held, lambda: like.new_empty(numel, dtype=dtype))

    def bring_to_host(self, flat: Tensor) -> Tensor:
        """Return 1-D memory of the host that a tensor is on its way to, on the current stream."""
        shape, dtype, device = flat.shape, flat.dtype, flat.device
        held = self._sums.setdefault((flat.numel(), dtype, None), [])
        kept = _free(held, lambda: empty_on_host(shape, dtype=dtype, device=device))
        return kept.copy_(flat, non_blocking=True)

    @contextlib.contextmanager
    def received(self, like: Tensor) -> Iterator[Tensor]:
        """Yield memory of a tensor's shape and dtype, for use within the block."""
        held = self._received.setdefault((like.dtype, like.device), [])
        found = next((each for each in held if not each.is_busy), None)
        if found is None:
            found = ReceivedBuffer()
            held.append(found)
        found.is_busy = True
        try:
            yield found.view(like)
        finally:
            found.is_busy = False

    def trim(self) -> None:
        """Let go of what was not needed since the last call, and of all that outlives no step."""
        for held in (*self._rows.values(), *self._sums.values()):
            held[:] = [each for each in held if each.is_recent and self._keeps(each.rows.device)]
            for each in held:
                each.is_recent = False
        self._received = {at: held for at, held in self._received.items() if self._keeps(at[1])}

    def _keeps(self, device: torch.device) -> bool:
        return self.outlive_steps and device.type == "cpu"


def _free(held: list[RowBuffer], make: Callable[[], Tensor]) -> Tensor:
    """Return memory that nobody uses, one that is there or a new one."""
    found = next((each for each in held if each.is_free), None)
    if found is None:
        found = RowBuffer(make())
        held.append(found)
    found.is_recent = True
    return found.rows.detach()


class GradientRows:
    """The gradients of some parameters of a group: of the same dtypes, all cut or all copies.

    Args:
        params: The parameters.
        places: Their indices in the layout.
        layout: Where they are in the buffer, which is one row if all ranks have copies.
        rank: Which row is this rank's.
        dtype: In which they are summed.
        buffers: Of the model.
        order: In which they are summed.
        num_ranks: What sums are divided by: all ranks that share a batch, those included whose
            tokens came to experts of this one.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        places: Sequence[int],
        layout: FlatLayout,
        rank: int,
        dtype: torch.dtype,
        buffers: GradientBuffers,
        order: ReductionOrder,
        num_ranks: int,
    ) -> None:
        self.params, self.dtype = params, dtype
        self._num_ranks = num_ranks
        self._layout, self._rank = layout, rank
        self._buffers, self._order = buffers, order
        self._places = dict(zip(params, places, strict=True))
        self._buffer: RowBuffer | None = None
        self._targets: dict[ShardedParameter, Tensor] = {}
        self._written: set[ShardedParameter] = set()

    def add(self, param: ShardedParameter, grad: Tensor) -> None:
        """Add a gradient to what is there of the parameter."""
        target = self._target(param)
        if param in self._written:
            target.add_(grad)
        else:
            target.copy_(grad)
        self._written.add(param)

    def write(self, grads: Mapping[ShardedParameter, Tensor]) -> None:
        """Write, or add, gradients of some of the parameters; leave zeros where there is none."""
        fresh: tuple[list[Tensor], list[Tensor]] = [], []
        for param, grad in grads.items():
            if param in self._written:
                self.add(param, grad)
                continue
            fresh[0].append(self._target(param))
            fresh[1].append(grad)
            self._written.add(param)
        if fresh[0]:
            foreach_copy_(*fresh)
        missing = [self._target(param) for param in self.params if param not in self._written]
        if missing:
            foreach_zero_(missing)

    def drop(self, param: ShardedParameter) -> None:
        """Drop what was written of one parameter."""
        self._written.discard(param)
        if not self._written:
            self.forget()

    def forget(self) -> None:
        """Drop what was written."""
        self._targets.clear()
        self._written.clear()
        if self._buffer is not None:
            self._buffer.is_busy = False
        self._buffer = None

    def mean(
        self, shards: dist.ProcessGroup | None, copies: dist.ProcessGroup | None
    ) -> Started[Tensor]:
        """Sum over ranks; return the mean, of this rank's row, and forget.

        Args:
            shards: The ranks with shards of the parameters.
            copies: The ranks with copies of those.

        Yields:
            What a :data:`.Reduction` does. Gradients may be written anew from the first on.
        """
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        self._targets.clear()
        self._written.clear()
        try:
            if self._layout.ranks > 1:
                assert shards is not None
                kept = yield from self._mean_of_shards(buffer.rows, shards, copies)
            else:
                kept = yield from self._mean_of_copies(buffer.rows[0], shards, copies)
            if self._buffers.on_host:
                kept = self._buffers.bring_to_host(kept)
            yield None
        finally:
            buffer.is_busy = False
        return kept

    def unpack(self, row: Tensor) -> dict[ShardedParameter, Tensor]:
        """Return views of the shards in this rank's row."""
        return {
            param: strided(
                row[self._layout.in_shard(place, self._rank, _numel(param))],
                param.local.shape,
                _stride(param),
            )
            for param, place in self._places.items()
        }

    def _mean_of_shards(
        self, rows: Tensor, shards: dist.ProcessGroup, copies: dist.ProcessGroup | None
    ) -> Started[Tensor]:
        is_shared_out = self._layout.ranks > shards.size()  # by the copies, among themselves
        rows = rows.view(shards.size(), -1) if is_shared_out else rows
        # A backend's own sum brings this rank's row alone.
        arriving = rows[:1] if self._order == "library" else rows
        with self._buffers.received(arriving) as received:
            own = yield from self._reduce_scatter(rows, shards, received)
            if not is_shared_out:
                if copies is not None:
                    yield from self._all_reduce(own, copies)
                return self._kept(own)
            assert copies is not None
            # A copy, so that the next group's gradients may arrive where these have.
            parts = own.clone().view(copies.size(), -1)
        own = yield from self._reduce_scatter(parts, copies, torch.empty_like(parts))
        return self._kept(own)

    def _reduce_scatter(
        self, rows: Tensor, group: dist.ProcessGroup, received: Tensor
    ) -> Started[Tensor]:
        """Sum over ranks what they have of this rank's row, in memory for what arrives."""
        own = received[0]
        if self._order == "library":
            yield start_reduce_scatter(rows, group, out=own)
        else:
            yield start_all_to_all(rows, group, out=received)
            ordered_sum(received, out=own)
        return own

    def _kept(self, own: Tensor) -> Tensor:
        dtype = self.params[0].local.dtype
        kept = self._buffers.sum(own.numel(), own, dtype)
        return torch.div(own if own.dtype == dtype else own.to(dtype), self._num_ranks, out=kept)

    def _mean_of_copies(
        self, row: Tensor, shards: dist.ProcessGroup | None, copies: dist.ProcessGroup | None
    ) -> Started[Tensor]:
        num_ranks, dtype = self._num_ranks, self.params[0].local.dtype
        if shards is None and copies is None:  # of experts that no other rank has
            return row.div_(num_ranks) if self.dtype == dtype else row.to(dtype) / num_ranks
        divides = self.dtype == dtype  # a shard of the sum, before all have it
        for group in (shards, copies):
            if group is not None:
                is_last = group is (shards if copies is None else copies)
                yield from self._all_reduce(row, group, num_ranks if is_last and divides else 1)
        return row if divides else row.to(dtype) / num_ranks

    def _all_reduce(
        self, row: Tensor, group: dist.ProcessGroup, divisor: int = 1
    ) -> Started[None]:
        """Sum a row over ranks, in its own memory, and divide it."""
        if self._order == "library" or _is_in_any_order(row, group):
            yield start_all_reduce(row, group)
            if divisor > 1:
                row.div_(divisor)
            return
        chunks = row.view(group.size(), -1)
        own = chunks[dist.get_rank(group)]  # of which every rank has a copy by then
        with self._buffers.received(chunks) as received:
            yield start_all_to_all(chunks, group, out=received)
            ordered_sum(received, out=own)
        if divisor > 1:
            own.div_(divisor)
        yield start_all_gather(own, group, out=chunks)

    def _target(self, param: ShardedParameter) -> Tensor:
        assert param.unsharded is not None
        if self._buffer is None:
            self._buffer = self._buffers.rows(self._layout, param.unsharded, self.dtype)
        if param not in self._targets:
            how = param.unsharded.shape, _stride(param)
            self._targets[param] = self._buffer.piece(self._layout, self._places[param], *how)
        return self._targets[param]


def _is_in_any_order(row: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a backend's sum has the bits of one in rank order, whatever its order is.

    Of two numbers it has: a + b is b + a, and rounding a wider sum again changes nothing in dtypes
    of half the digits or fewer. Nothing of another rank's is held then but what the backend holds.
    """
    return group.size() == 2 and row.is_floating_point()


def _numel(param: ShardedParameter) -> int:
    """Return the elements that ranks share out: all of a tensor-parallel rank's."""
    assert param.unsharded is not None
    return param.unsharded.numel()


def _stride(param: ShardedParameter) -> Stride | None:
    """Return the strides of a gradient in the buffer: of copies those of what computes."""
    assert param.unsharded is not None
    return param.unsharded.stride() if param.place is None else None
