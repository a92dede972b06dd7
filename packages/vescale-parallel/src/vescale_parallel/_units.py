"""ZeRO: gather the parameters of a block for compute, sum their gradients back to the owners.

A unit is a block of the model, or everything outside the blocks. Its parameters travel
together: one all-gather in, one reduce-scatter out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, all_gather, all_reduce, reduce_scatter

from ._mesh import axis_group, axis_size
from ._slots import Slot


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        slots: The parameters this rank computes with.
        mesh: The plan's mesh.
        param_dtype: Dtype of compute, None for each parameter's own.
        reduce_dtype: Dtype of gradient sums, None for the gradient's own.
        number: Tells units apart; ranks that mix them up are found by :attr:`mixed_up`.
    """

    slots: Sequence[Slot]
    mesh: DeviceMesh
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    number: int
    _mixed_up: Tensor | None = None
    _pending: dict[Slot, Tensor] = field(default_factory=dict["Slot", Tensor])
    _used: set[Slot] = field(default_factory=set["Slot"])

    @property
    def is_freed(self) -> bool:
        """Whether :meth:`free` took the memory of a parameter that computes."""
        return any(
            slot.compute is not None
            and slot.compute.numel() > 0
            and slot.compute.untyped_storage().size() == 0
            for slot in self.slots
        )

    def show_compute(self) -> None:
        """Hang the plain parameters on the modules."""
        for slot in self.slots:
            slot.show_compute()

    def show_faces(self) -> None:
        """Hang the public parameters on the modules."""
        for slot in self.slots:
            slot.show_face()

    def forget(self) -> None:
        """Drop gradients that a failed backward pass left."""
        self._pending, self._used = {}, set()
        for slot in self.slots:
            if slot.compute is not None:
                slot.compute.grad = None

    def take_mixed_up(self) -> Tensor | None:
        """Return whether a collective met another unit's since the last call, if it ran."""
        mixed_up, self._mixed_up = self._mixed_up, None
        return mixed_up

    def gather(self) -> None:
        """Fill the compute parameters from the faces. Every dp_shard rank must call this."""
        apart = [slot for slot in self.slots if not slot.shares_storage]
        for slot in apart:
            _allocate(slot)
            if slot.shard_dim is None and slot.local.numel():
                _compute_data(slot).copy_(slot.local)
        for sharded in _by_dtype([slot for slot in apart if slot.shard_dim is not None]):
            self._all_gather(sharded)

    def free(self) -> None:
        """Give back the memory of gathered parameters."""
        for slot in self.slots:
            if slot.compute is not None and not slot.shares_storage:
                slot.compute.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """Sum gradients over ranks and keep this rank's part. Every rank must call this.

        A parameter without gradient on this rank counts as zero: another rank may have one.
        The result is the mean over data-parallel ranks; :meth:`take` hands it out.
        """
        reduce_together([self])

    def take_grads(self) -> dict[Slot, Tensor]:
        """Take the gradients of the compute parameters, zero where there is none."""
        return {slot: self._take_grad(slot) for slot in self.slots if slot.face.requires_grad}

    def reduce_over_data(self, grads: dict[Slot, Tensor]) -> None:
        """Average gradients over data-parallel ranks; keep this rank's part."""
        for sharded in _by_dtype([slot for slot in grads if slot.shard_dim is not None]):
            self._reduce_scatter(sharded, grads)
        whole = [slot for slot in grads if slot.shard_dim is None]
        self.sum_copies(whole, grads, "dp_shard")
        self.sum_copies(list(grads), grads, "dp_replicate")
        ranks = axis_size(self.mesh, "dp_shard") * axis_size(self.mesh, "dp_replicate")
        for slot, grad in grads.items():
            mean = grad.to(slot.local.dtype)
            if ranks > 1:
                mean = mean / ranks
            held = self._pending.get(slot)
            self._pending[slot] = mean if held is None else held + mean

    def take(self) -> dict[Slot, Tensor]:
        """Return the reduced gradients since the last call, and forget them."""
        reduced, self._pending = self._pending, {}
        return reduced

    def take_used(self) -> set[Slot]:
        """Return the parameters that had a gradient on this rank since the last call."""
        used, self._used = self._used, set()
        return used

    def _tag(self, like: Tensor) -> Tensor:
        # Small enough to be exact in any dtype, and so is its sum over ranks.
        return torch.tensor([self.number % 16 + 1], dtype=like.dtype, device=like.device)

    def _check_tags(self, differ: Tensor) -> None:
        # Looked at once a step, with other flags: a look here would wait for the device.
        seen = differ.any()
        self._mixed_up = seen if self._mixed_up is None else self._mixed_up | seen

    def _take_grad(self, slot: Slot) -> Tensor:
        assert slot.compute is not None
        grad, slot.compute.grad = slot.compute.grad, None
        if grad is not None:
            self._used.add(slot)
        dtype = self.reduce_dtype or slot.compute.dtype
        if grad is None:
            return torch.zeros(slot.compute.shape, dtype=dtype, device=slot.compute.device)
        return grad.to(dtype)

    def sum_copies(self, slots: list[Slot], grads: dict[Slot, Tensor], axis: str) -> None:
        """Sum gradients over the ranks of a mesh axis, in rank order."""
        group = axis_group(self.mesh, axis)
        if group is None:
            return
        for same in _by_dtype(slots):
            flat = torch.cat([grads[slot].reshape(-1) for slot in same])
            _unflatten(all_reduce(flat, group), same, grads)

    def _all_gather(self, slots: list[Slot]) -> None:
        group = axis_group(self.mesh, "dp_shard")
        if group is None:
            return
        ranks = axis_size(self.mesh, "dp_shard")
        dtype = _compute_data(slots[0]).dtype
        parts = [_padded(slot.local.to(dtype), _chunk(slot, ranks)) for slot in slots]
        rows = all_gather(torch.cat([self._tag(parts[0]), *parts]), group)  # (ranks, numel)
        self._check_tags(rows[:, 0] != rows[0, 0])
        start = 1
        for slot in slots:
            chunk = _chunk(slot, ranks)
            parts = rows[:, start : start + chunk.numel()].unflatten(1, chunk)
            _join(parts, _compute_data(slot), slot.shard_dim or 0)
            start += chunk.numel()

    def _reduce_scatter(self, slots: list[Slot], grads: dict[Slot, Tensor]) -> None:
        group = axis_group(self.mesh, "dp_shard")
        if group is None:
            return
        ranks = axis_size(self.mesh, "dp_shard")
        rows = torch.cat(
            [
                _rows(grads[slot], slot.shard_dim or 0, _chunk(slot, ranks), ranks)
                for slot in slots
            ],
            dim=1,
        )
        tag = self._tag(rows)
        own = reduce_scatter(torch.cat([tag.expand(ranks, 1), rows], dim=1), group)
        self._check_tags(own[:1] != tag * ranks)
        start = 1
        for slot in slots:
            chunk = _chunk(slot, ranks)
            part = own[start : start + chunk.numel()].view(chunk)
            grads[slot] = part[tuple(slice(size) for size in slot.local.shape)]
            start += chunk.numel()


def reduce_together(units: Sequence[Unit]) -> None:
    """Do what :meth:`Unit.reduce` does for several units. Every rank must call this.

    The addends that tensor-parallel ranks hold travel in one collective, whatever unit they
    are of: they are small and many.
    """
    grads: dict[Slot, Tensor] = {}
    slots_of: list[tuple[Unit, list[Slot]]] = []
    for unit in units:
        taken = unit.take_grads()
        slots_of.append((unit, list(taken)))
        grads |= taken
    addends = [slot for slot in grads if slot.partial_over_tp]
    if addends:
        units[0].sum_copies(addends, grads, "tp")
    for unit, slots in slots_of:
        # Popped, so that a whole gradient is let go of as soon as its shard is known.
        unit.reduce_over_data({slot: grads.pop(slot) for slot in slots})


def _by_dtype(slots: Sequence[Slot]) -> list[list[Slot]]:
    groups: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        assert slot.compute is not None
        groups.setdefault(slot.compute.dtype, []).append(slot)
    return list(groups.values())


def _compute_data(slot: Slot) -> Tensor:
    assert slot.compute is not None
    # Not detach(): writing must not count as a change of a tensor that backward saved.
    return slot.compute.data


def _allocate(slot: Slot) -> None:
    data = _compute_data(slot)
    storage = data.untyped_storage()
    if storage.size() == 0:
        storage.resize_(data.numel() * data.element_size())


def _chunk(slot: Slot, ranks: int) -> torch.Size:
    """Return the shape of the largest shard, to which all are padded."""
    assert slot.compute is not None
    assert slot.shard_dim is not None
    shape = list(slot.compute.shape)
    shape[slot.shard_dim] = -(-shape[slot.shard_dim] // ranks)
    return torch.Size(shape)


def _padded(local: Tensor, chunk: torch.Size) -> Tensor:
    if local.shape == chunk:
        return local.reshape(-1)
    whole = local.new_zeros(chunk)
    whole[tuple(slice(size) for size in local.shape)] = local
    return whole.view(-1)


def _join(parts: Tensor, target: Tensor, dim: int) -> None:
    """Copy the shards of all ranks, (ranks, *chunk), into the whole tensor."""
    step = parts.shape[dim + 1]
    for rank, part in enumerate(parts.unbind()):
        size = min(step, target.shape[dim] - rank * step)
        if size > 0:
            target.narrow(dim, rank * step, size).copy_(part.narrow(dim, 0, size))


def _rows(grad: Tensor, dim: int, chunk: torch.Size, ranks: int) -> Tensor:
    """Cut a whole gradient into one padded row per rank: (ranks, chunk numel)."""
    step = chunk[dim]
    rows = grad.new_zeros(ranks, *chunk)
    for rank in range(ranks):
        size = min(step, grad.shape[dim] - rank * step)
        if size > 0:
            rows[rank].narrow(dim, 0, size).copy_(grad.narrow(dim, rank * step, size))
    return rows.view(ranks, -1)


def _unflatten(flat: Tensor, slots: Sequence[Slot], grads: dict[Slot, Tensor]) -> None:
    start = 0
    for slot in slots:
        shape = grads[slot].shape
        grads[slot] = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()


def settle(slot: Slot) -> None:
    """Cut a gradient that the face got itself, from distributed tensors, as the face is cut."""
    face: Any = slot.face
    grad: Any = face.grad
    if isinstance(grad, DTensor) and tuple(grad.placements) != tuple(face.placements):
        face.grad = grad.redistribute(placements=face.placements)


def accumulate(slot: Slot, grad: Tensor, scale: Tensor | None) -> None:
    """Add a reduced gradient to the face's ``.grad``, as autograd does, hooks included."""
    if scale is not None:
        grad = grad * scale.to(grad.dtype)
    face: Any = slot.face
    total: Any = DTensor.from_local(
        grad.contiguous(), face.device_mesh, face.placements, shape=face.shape
    )
    for hook in (face._backward_hooks or {}).values():
        changed = hook(total)
        total = total if changed is None else changed
    if face.grad is None:
        face.grad = total
    else:
        face.grad.add_(total)
    for hook in (face._post_accumulate_grad_hooks or {}).values():
        hook(face)
