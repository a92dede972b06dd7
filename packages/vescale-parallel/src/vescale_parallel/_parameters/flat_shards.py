"""Parameters that ranks hold as ranges of one flat buffer; see [Note: flat buffers].

[Note: shards in what is gathered] Where the buffer keeps its memory once it was gathered, and has
the dtype of the range, the range is a part of it: an optimizer's step writes to what computes, as
on one device, and the other ranges arrive with the next gather. Until then the buffer is neither
the old parameters nor the new ones, so nothing computes with it: forward gathers first, and
backward through a forward of before is refused ([Note: stale graphs]).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from vescale_dtensor import InterleavedShard, local_shape

from .flat_layout import FlatLayout, FlatShape, flat_layout
from .host_memory import zeros_on_host
from .memory_layout import Stride, dense_stride, is_in_index_order, strided

# An axis that cuts what ranks compute with: its size, this rank on it, and how.
Cut = tuple[int, int, Placement]
# What travels with a parameter, the parameter, and what cuts what ranks compute with.
Placed = tuple[Hashable, nn.Parameter, Sequence[Cut]]


@dataclass(eq=False)
class FlatShards:
    """A flat buffer of parameters: this rank's range, and what all ranges are gathered to.

    Memory is taken when it is first asked for: a stage of a pipeline has none for what other
    stages own.

    Attributes:
        layout: Where parameters are.
        rank: Whose range this is.
        dtype: Of the range.
        compute_dtype: Of the buffer that is gathered.
        device: Of both, but if the range is on the host.
        replicas: Ranks whose ranges, which follow each other, each of them sends when the buffer
            is gathered: copies of a model that share out its optimizer state.
        on_host: Whether the range is there, of one replica; see [Note: memory of the host].
        is_viewed: Whether parameters that compute are views of the buffer that is gathered, and
            not filled from it; see [Note: memory layouts].
        is_kept: Whether the buffer is never freed once it was gathered.
    """

    layout: FlatLayout
    rank: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    replicas: int = 1
    on_host: bool = False
    is_viewed: bool = True
    is_kept: bool = False
    _own: Tensor | None = None
    _sent: Tensor | None = None
    _whole: Tensor | None = None

    @property
    def own(self) -> Tensor:
        """This rank's range."""
        if self._own is None:
            if self.is_sent_in_place:
                self._own = self.rows_of_replicas[self.rank % self.replicas]
            elif self.is_in_whole:
                self._own = _in_storage_of_its_own(self.whole[self.rank])
            else:
                # Zeros: padding is summed and sent with the rest.
                zeros = zeros_on_host if self.on_host else torch.zeros
                self._own = zeros(self.layout.shard, dtype=self.dtype, device=self.device)
        return self._own

    @property
    def is_sent_in_place(self) -> bool:
        """Whether this rank's range is a part of what it keeps of the replicas' ranges."""
        return self.replicas > 1 and self.dtype == self.compute_dtype

    @property
    def is_in_whole(self) -> bool:
        """Whether this rank's range is a part of the buffer; see [Note: shards in what ...]."""
        return (
            self.is_kept
            and self.is_viewed
            and not self.on_host
            and self.replicas == 1
            and self.dtype == self.compute_dtype
        )

    @property
    def sent(self) -> Tensor:
        """What this rank sends when the buffer is gathered, 1-D.

        Of several replicas it is kept, and as current as it was gathered from them.
        """
        if self.replicas == 1:
            return self.own.to(self.compute_dtype)
        if self._sent is None:
            numel = self.replicas * self.layout.shard
            self._sent = torch.zeros(numel, dtype=self.compute_dtype, device=self.device)
        return self._sent

    @property
    def rows_of_replicas(self) -> Tensor:
        """What this rank sends, (replicas, shard)."""
        return self.sent.view(self.replicas, -1)

    @property
    def whole(self) -> Tensor:
        """What all ranks send, a row each; without memory until it is gathered."""
        if self._whole is None:
            shape = self.layout.ranks // self.replicas, self.replicas * self.layout.shard
            # Zeros as this rank's range may be in it, with padding.
            made = torch.zeros if self.is_in_whole else torch.empty
            self._whole = made(shape, dtype=self.compute_dtype, device=self.device)
            self.release_whole()
        return self._whole

    def allocate_whole(self) -> None:
        """Give what is gathered memory."""
        allocate(self.whole)

    def release_whole(self) -> None:
        """Give back the memory of what is gathered, but for what has this rank's range."""
        if self._whole is not None and not self.is_in_whole:
            release(self._whole)

    def shard_of(self, index: int, numel: int, shape: torch.Size) -> Tensor:
        """Return the shard of a parameter of ``numel`` elements, in this rank's range."""
        where = self.layout.in_shard(index, self.rank, numel)
        # Not detach(): a write to one parameter must not count as one to all.
        return self.own[where].view(shape).data

    def gathered_shard_of(self, index: int, numel: int, shape: torch.Size) -> Tensor:
        """Return what :meth:`shard_of` does, of the buffer that is gathered."""
        where = self.layout.in_shard(index, self.rank, numel)
        return self.whole.view(-1, self.layout.shard)[self.rank][where].view(shape)

    def send_gathered(self, index: int, numel: int) -> None:
        """Send of a parameter, from now on, what the buffer that is gathered has of it."""
        if self.replicas > 1:
            first = self.rank // self.replicas * len(self.sent)
            where = self.layout.in_whole(index, numel)
            low, high = max(where.start, first), min(where.stop, first + len(self.sent))
            if low < high:
                self.sent[low - first : high - first].copy_(self.whole.view(-1)[low:high])

    def whole_of(self, index: int, shape: torch.Size, stride: Stride) -> Tensor:
        """Return a whole parameter, for what computes; without memory, too."""
        if not self.is_viewed:
            options: Any = {"dtype": self.compute_dtype, "device": self.device}
            whole = torch.empty_strided(shape, stride, **options)
            release(whole)
            return whole
        self.allocate_whole()  # or torch makes no views of it
        whole = strided(self._gathered(index, shape.numel()), shape, stride).data
        self.release_whole()
        return whole

    def fill(self, index: int, whole: Tensor) -> None:
        """Copy a parameter that is no view from the buffer, which must be gathered."""
        allocate(whole)
        whole.copy_(self._gathered(index, whole.numel()).view(whole.shape))

    def take_back(self, index: int, whole: Tensor) -> None:
        """Copy a parameter that is no view to its place in the buffer, which gets memory."""
        self.allocate_whole()
        self._gathered(index, whole.numel()).view(whole.shape).copy_(whole)

    def _gathered(self, index: int, numel: int) -> Tensor:
        return self.whole.view(-1)[self.layout.in_whole(index, numel)]


@dataclass(frozen=True, slots=True)
class FlatPlace:
    """A parameter's place in a flat buffer."""

    shards: FlatShards
    index: int

    @property
    def placement(self) -> Placement:
        """How ranks hold the parameter."""
        return self.shards.layout.placement(self.index)

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have parts of the buffer."""
        return self.shards.layout.ranks > 1


def place_in_buffers(
    parameters: Mapping[int, Placed],
    *,
    ranks: int,
    rank: int,
    copies: int,
    replicas: int,
    compute_dtype: Callable[[Tensor], torch.dtype],
    device: torch.device,
    on_host: bool,
    is_kept: bool,
    block: int = 1,
) -> dict[int, FlatPlace]:
    """Return where each parameter is.

    Args:
        parameters: By key.
        ranks: Those that hold ranges.
        rank: This one.
        copies: Of each range, on as many ranks, which share out the sum of its gradients.
        replicas: See :class:`FlatShards`.
        compute_dtype: That of a parameter in forward and backward.
        device: Of the buffers.
        on_host: Whether the ranges are on the host.
        is_kept: Whether what is gathered is never freed.
        block: Elements that are on one rank, see :class:`.FlatShape`.
    """
    # Those that train apart from those that do not, whose gradients have no room then; and those
    # that are no views of what is gathered.
    together: dict[tuple[Any, ...], list[int]] = {}
    for key, (group, parameter, _) in parameters.items():
        like = parameter.dtype, compute_dtype(parameter), parameter.requires_grad
        is_viewed = is_in_index_order(parameter.shape, dense_stride(parameter))
        together.setdefault((group, is_viewed, *like), []).append(key)
    places: dict[int, FlatPlace] = {}
    for (_, is_viewed, *_), keys in together.items():
        _, like, _ = parameters[keys[0]]
        shapes = tuple(_flat_shape(*parameters[key][1:], block) for key in keys)
        dtype = compute_dtype(like)
        layout = flat_layout(shapes, ranks, min(like.itemsize, dtype.itemsize), copies)
        own = rank, like.dtype, dtype, device, replicas, on_host, is_viewed, is_kept
        shards = FlatShards(layout, *own)
        places |= {key: FlatPlace(shards, index) for index, key in enumerate(keys)}
    return places


def _flat_shape(whole: nn.Parameter, cuts: Sequence[Cut], block: int) -> FlatShape:
    """Return the largest part of a parameter that a rank computes with."""
    sizes, _, how = zip(*cuts, strict=True)
    parts = {
        local_shape(whole.shape, sizes, ranks, how)
        for ranks in itertools.product(*map(range, sizes))
    }
    dims = [each.dim for each in how if isinstance(each, Shard | InterleavedShard)]
    # Where rows differ in length, only elements are in the same range on all ranks.
    return FlatShape(max(parts), is_flattened=len(parts) > 1 and any(dims), block=block)


def groups_of(model: nn.Module, blocks: Sequence[str]) -> Callable[[Sequence[str]], int | None]:
    """Return what tells the block that a parameter is of; None outside, and for several."""
    block_of = {
        f"{fqn}.{name}": index
        for index, fqn in enumerate(blocks)
        for name, _ in model.get_submodule(fqn).named_parameters(remove_duplicate=False)
    }

    def group_of(fqns: Sequence[str]) -> int | None:
        where = {block_of.get(fqn) for fqn in fqns}
        return where.pop() if len(where) == 1 else None

    return group_of


def _in_storage_of_its_own(row: Tensor) -> Tensor:
    """Return memory as a tensor that is no view of the tensor that has it, which it keeps alive.

    So the views of a range are counted apart from those of the buffer, see [Note: what tells ...].
    """
    first = row.storage_offset() * row.element_size()
    storage = row.untyped_storage()[first : first + row.nbytes]
    made: Any = torch.empty(0, dtype=row.dtype, device=row.device)
    return made.set_(storage, 0, row.shape)


def allocate(tensor: Tensor) -> None:
    """Give a tensor whose memory was released new memory."""
    storage = tensor.untyped_storage()
    if storage.size() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())


def release(tensor: Tensor) -> None:
    """Give back the memory of a tensor; views of it stay valid once it has memory again.

    Unless NumPy was given it, which may read it as long as it likes.
    """
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
