"""Shared memory: each tensor in it gets what was saved of it, or the load is refused.

[Note: shared memory]
Two views of one buffer may both be in a state, and both are stored. If both are read into the
buffer, the last one wins; whether that is what was saved as the other is not known. So each is
read into memory of its own, then all are copied to the buffer and compared with it. The
same goes for a tensor of which several elements are one, as after ``expand``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from vescale_ckpt._state.local_shards import view_of
from vescale_ckpt.exceptions import CheckpointError, MismatchError

from .read_items import ReadItem


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """A tensor that is read into memory of its own.

    Attributes:
        item: What is read.
        given: The memory that was given for it.
        others: The keys of the tensors that share the memory.
    """

    item: ReadItem
    given: torch.Tensor
    others: tuple[str, ...]

    def copy(self) -> None:
        """Put what was read where it belongs."""
        _distinct(self.given).copy_(_distinct(self.item.target, self.given))

    def compare(self) -> None:
        """Check that all that was read is there.

        Raises:
            MismatchError: If something else was put there as well.
        """
        if not torch.equal(_bits(self.given), _bits(self.item.target)):
            others = ", ".join(map(repr, self.others)) or "itself (it was expanded)"
            raise MismatchError(
                f"{self.item.key!r} shares its memory in the given state with {others}, but the "
                f"checkpoint has other values for it; give it memory of its own, with clone(), or "
                f"load only one of them"
            )


def settle(own_copies: Sequence[OwnCopy]) -> None:
    """Fill the tensors that share memory; see [Note: shared memory].

    Raises:
        MismatchError: If the checkpoint has other values for one than for another.
    """
    for own_copy in own_copies:
        own_copy.copy()
    for own_copy in own_copies:
        own_copy.compare()


def apart(items: list[ReadItem]) -> list[OwnCopy]:
    """Replace targets of read items that share memory; see [Note: shared memory].

    Raises:
        CheckpointError: If two stored tensors are to be read into the very same tensor, or
            elements of a tensor lie over one another otherwise than after ``expand``.
    """
    sharing: dict[int, set[int]] = {
        index: set() for index, item in enumerate(items) if _checked_folds(item)
    }
    for a, b in _neighbours(items):
        if _overlap(items[a].target, items[b].target) and not _is_same(items[a], items[b]):
            _refuse_same_tensor(items[a], items[b])
            sharing.setdefault(a, set()).add(b)
            sharing.setdefault(b, set()).add(a)
    own_copies = [
        OwnCopy(items[own], items[own].target, tuple(sorted({items[o].key for o in others})))
        for own, others in sharing.items()
    ]
    for own_copy in own_copies:
        own_copy.item.target = torch.empty(
            own_copy.given.shape, dtype=own_copy.given.dtype, device=own_copy.given.device
        )
    return own_copies


def _checked_folds(item: ReadItem) -> bool:
    """Return whether a tensor was expanded."""
    if not _folds(item.target):
        return False
    if _folds(_distinct(item.target)):
        raise CheckpointError(
            f"{item.key!r} has strides {item.target.stride()}, with which its elements lie over "
            f"one another; give it memory of its own, with clone()"
        )
    return True


def _neighbours(items: Sequence[ReadItem]) -> Iterator[tuple[int, int]]:
    """Yield pairs of read items of which one begins before the other ends."""
    by_device: dict[torch.device, list[int]] = {}
    for index, item in enumerate(items):
        by_device.setdefault(item.target.device, []).append(index)
    for indices in by_device.values():
        indices.sort(key=lambda index: items[index].target.data_ptr())
        reaching: list[int] = []
        for index in indices:
            start = items[index].target.data_ptr()
            reaching = [other for other in reaching if _end(items[other].target) > start]
            yield from ((other, index) for other in reaching)
            reaching.append(index)


def _end(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + _extent(tensor)


def _refuse_same_tensor(a: ReadItem, b: ReadItem) -> None:
    if view_of(a.target) == view_of(b.target) and a.stored != b.stored:
        first, second = sorted([a.key, b.key])
        raise CheckpointError(
            f"{first!r} and {second!r} share their memory in the given state, but are "
            f"two tensors in the checkpoint; untie them or load only one of them"
        )


def _is_same(a: ReadItem, b: ReadItem) -> bool:
    """Return whether two read items put the same bytes into the same elements."""
    return view_of(a.target) == view_of(b.target) and (a.stored, a.ranges) == (b.stored, b.ranges)


def _loops(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of each dim that has more than one element, the shortest first."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted((stride, size) for stride, size in dims if size > 1)


def _extent(tensor: torch.Tensor) -> int:
    """Return how many bytes there are from the first element to the end of the last."""
    return (1 + sum(stride * (size - 1) for stride, size in _loops(tensor))) * tensor.itemsize


def _folds(tensor: torch.Tensor) -> bool:
    """Return whether some elements of a tensor lie over one another."""
    reach = 1
    for stride, size in _loops(tensor):
        if stride < reach:
            return stride == 0 or _addresses(tensor).unique().numel() < tensor.numel()
        reach = stride * (size - 1) + reach
    return False


def _distinct(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return one of those elements that are the same, seen along expanded dims of ``like``."""
    strides = (tensor if like is None else like).stride()
    expanded = [dim for dim, stride in enumerate(strides) if stride == 0]
    return reduce(lambda view, dim: view.narrow(dim, 0, 1), expanded, tensor)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether any byte belongs to both."""
    if b.data_ptr() >= a.data_ptr() + _extent(a) or a.data_ptr() >= b.data_ptr() + _extent(b):
        return False
    if _is_dense(a) and _is_dense(b):
        return True
    base = min(a.data_ptr(), b.data_ptr())
    end = max(a.data_ptr() + _extent(a), b.data_ptr() + _extent(b))
    taken = torch.zeros(end - base, dtype=torch.bool, device="cpu")
    _bytes_in(taken, a, base).fill_(True)
    return bool(_bytes_in(taken, b, base).any())


def _is_dense(tensor: torch.Tensor) -> bool:
    return _extent(tensor) == tensor.nbytes


def _bytes_in(taken: torch.Tensor, tensor: torch.Tensor, base: int) -> torch.Tensor:
    """Return the places of a tensor's bytes in a map of memory that begins at ``base``."""
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    shape = (*tensor.shape, tensor.itemsize)
    return taken.as_strided(shape, (*strides, 1), tensor.data_ptr() - base)


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    shape: Sequence[int] = tensor.shape
    places = torch.arange(_extent(tensor) // tensor.itemsize, device="cpu")
    return places.as_strided(shape, tensor.stride())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes, which are equal for NaN as well."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.reshape(-1)
