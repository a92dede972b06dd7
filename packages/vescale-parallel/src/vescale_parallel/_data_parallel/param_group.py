"""ZeRO: gather the parameters of a block for compute, sum their gradients back to the owners.

A parameter group is a block of the model, or everything outside the blocks. Its parameters travel
together: one all-gather in, one reduce-scatter out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, all_gather, all_reduce, reduce_scatter
from vescale_parallel._mesh.mesh import axis_group, axis_size
from vescale_parallel._parameters.sharded_parameter import ShardedParameter


def mixed_up_error() -> ValueError:
    """Return what to raise where ranks exchanged parameters of different groups."""
    return ValueError(
        "data-parallel ranks ran different blocks of the model at the same time, so "
        "parameters got mixed up; with ZeRO stages 2 and 3 control flow must not "
        "depend on this rank's data: every rank runs the same blocks, as often. Use "
        "data_parallel.zero_stage 1"
    )


@dataclass(eq=False)
class ParamGroup:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        params: The parameters this rank computes with.
        mesh: The plan's mesh.
        param_dtype: Dtype of compute, None for each parameter's own.
        reduce_dtype: Dtype of gradient sums, None for the gradient's own.
        number: Tells groups apart; ranks that mix them up are found by :attr:`mixed_up`.
    """

    params: Sequence[ShardedParameter]
    mesh: DeviceMesh
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    number: int
    _mixed_up: Tensor | None = None
    _pending: dict[ShardedParameter, Tensor] = field(
        default_factory=dict["ShardedParameter", Tensor]
    )
    _used: set[ShardedParameter] = field(default_factory=set["ShardedParameter"])

    @property
    def is_freed(self) -> bool:
        """Whether :meth:`free` took the memory of a parameter that computes."""
        return any(
            param.unsharded is not None
            and param.unsharded.numel() > 0
            and param.unsharded.untyped_storage().size() == 0
            for param in self.params
        )

    def show_unsharded(self) -> None:
        """Hang the plain parameters on the modules."""
        for param in self.params:
            param.show_unsharded()

    def show_sharded(self) -> None:
        """Hang the public parameters on the modules."""
        for param in self.params:
            param.show_sharded()

    def forget(self) -> None:
        """Drop gradients that a failed backward pass left."""
        self._pending, self._used = {}, set()
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None

    def take_mixed_up(self) -> Tensor | None:
        """Return whether a collective was paired with another group's since the last call."""
        mixed_up, self._mixed_up = self._mixed_up, None
        return mixed_up

    def gather(self) -> None:
        """Fill unsharded parameters from sharded ones. Every dp_shard rank must call this."""
        apart = [param for param in self.params if not param.shares_storage]
        for param in apart:
            _allocate(param)
            if param.shard_dim is None and param.local.numel():
                _unsharded_data(param).copy_(param.local)
        for sharded in _by_dtype([param for param in apart if param.shard_dim is not None]):
            self._all_gather(sharded)

    def free(self) -> None:
        """Give back the memory of gathered parameters."""
        for param in self.params:
            if param.unsharded is not None and not param.shares_storage:
                param.unsharded.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """Sum gradients over ranks and keep this rank's shard. Every rank must call this.

        A parameter without gradient on this rank counts as zero: another rank may have one.
        The result is the mean over data-parallel ranks; :meth:`take` hands it out.
        """
        reduce_together([self])

    def take_grads(self) -> dict[ShardedParameter, Tensor]:
        """Take the gradients of the unsharded parameters, zero where there is none."""
        return {
            param: self._take_grad(param) for param in self.params if param.sharded.requires_grad
        }

    def reduce_over_data(self, grads: dict[ShardedParameter, Tensor]) -> None:
        """Average gradients over data-parallel ranks; keep this rank's shard."""
        for sharded in _by_dtype([param for param in grads if param.shard_dim is not None]):
            self._reduce_scatter(sharded, grads)
        whole = [param for param in grads if param.shard_dim is None]
        self.sum_copies(whole, grads, "dp_shard")
        self.sum_copies(list(grads), grads, "dp_replicate")
        ranks = axis_size(self.mesh, "dp_shard") * axis_size(self.mesh, "dp_replicate")
        for param, grad in grads.items():
            mean = grad.to(param.local.dtype)
            if ranks > 1:
                mean = mean / ranks
            held = self._pending.get(param)
            self._pending[param] = mean if held is None else held + mean

    def take(self) -> dict[ShardedParameter, Tensor]:
        """Return the reduced gradients since the last call, and forget them."""
        reduced, self._pending = self._pending, {}
        return reduced

    def put(self, reduced: dict[ShardedParameter, Tensor], used: set[ShardedParameter]) -> None:
        """Put back what :meth:`take` and :meth:`take_used` returned."""
        self._pending, self._used = reduced, used

    def take_used(self) -> set[ShardedParameter]:
        """Return the parameters that had a gradient on this rank since the last call."""
        used, self._used = self._used, set()
        return used

    def _tag(self, like: Tensor) -> Tensor:
        # Small enough to be exact in any dtype, and so is its sum over ranks.
        return torch.tensor([self.number % 16 + 1], dtype=like.dtype, device=like.device)

    def _check_tags(self, differ: Tensor) -> None:
        seen = differ.any()
        # At once where that is free: what ranks exchange next may not even be of one size.
        if seen.device.type == "cpu" and not torch.compiler.is_compiling() and bool(seen):
            raise mixed_up_error()
        # On a GPU once a step, with other flags: a look here would wait for the device.
        self._mixed_up = seen if self._mixed_up is None else self._mixed_up | seen

    def _take_grad(self, param: ShardedParameter) -> Tensor:
        assert param.unsharded is not None
        grad, param.unsharded.grad = param.unsharded.grad, None
        if grad is not None:
            self._used.add(param)
        dtype = self.reduce_dtype or param.unsharded.dtype
        if grad is None:
            return torch.zeros(param.unsharded.shape, dtype=dtype, device=param.unsharded.device)
        return grad.to(dtype)

    def sum_copies(
        self, params: list[ShardedParameter], grads: dict[ShardedParameter, Tensor], axis: str
    ) -> None:
        """Sum gradients over the ranks of a mesh axis, in rank order."""
        group = axis_group(self.mesh, axis)
        if group is None:
            return
        for same in _by_dtype(params):
            flat = torch.cat([grads[param].reshape(-1) for param in same])
            _unflatten(all_reduce(flat, group), same, grads)

    def _all_gather(self, params: list[ShardedParameter]) -> None:
        group = axis_group(self.mesh, "dp_shard")
        if group is None:
            return
        ranks = axis_size(self.mesh, "dp_shard")
        dtype = _unsharded_data(params[0]).dtype
        # Shards are of torch.chunk, so the last ones may be short: each is padded to the largest,
        # which makes the offset of a parameter the same in the row of every rank.
        parts = [_padded(param.local.to(dtype), _chunk(param, ranks)) for param in params]
        rows = all_gather(torch.cat([self._tag(parts[0]), *parts]), group)  # (ranks, numel)
        self._check_tags(rows[:, 0] != rows[0, 0])
        start = 1
        for param in params:
            chunk = _chunk(param, ranks)
            parts = rows[:, start : start + chunk.numel()].unflatten(1, chunk)
            _join(parts, _unsharded_data(param), param.shard_dim or 0)
            start += chunk.numel()

    def _reduce_scatter(
        self, params: list[ShardedParameter], grads: dict[ShardedParameter, Tensor]
    ) -> None:
        group = axis_group(self.mesh, "dp_shard")
        if group is None:
            return
        ranks = axis_size(self.mesh, "dp_shard")
        rows = torch.cat(
            [
                _rows(grads[param], param.shard_dim or 0, _chunk(param, ranks), ranks)
                for param in params
            ],
            dim=1,
        )
        # Summed, the tags of ranks that reduce the same group are `ranks` times this one.
        tag = self._tag(rows)
        own = reduce_scatter(torch.cat([tag.expand(ranks, 1), rows], dim=1), group)
        self._check_tags(own[:1] != tag * ranks)
        start = 1
        for param in params:
            chunk = _chunk(param, ranks)
            part = own[start : start + chunk.numel()].view(chunk)
            grads[param] = part[tuple(slice(size) for size in param.local.shape)]
            start += chunk.numel()


def group_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    params: Sequence[ShardedParameter],
    blocks: Sequence[str],
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> tuple[ParamGroup, list[tuple[nn.Module, ParamGroup]]]:
    """Return the parameter group of what is outside of blocks, and the blocks with theirs.

    A block without parameters here has no group.
    """
    block_of = {
        f"{fqn}.{name}": index
        for index, fqn in enumerate(blocks)
        for name, _ in model.get_submodule(fqn).named_parameters(remove_duplicate=False)
    }
    members: dict[int | None, list[ShardedParameter]] = {None: []}
    for param in params:
        where = {block_of.get(fqn) for fqn in param.fqns}
        members.setdefault(where.pop() if len(where) == 1 else None, []).append(param)

    def param_group(index: int | None) -> ParamGroup:
        number = 0 if index is None else index + 1
        return ParamGroup(members[index], mesh, param_dtype, reduce_dtype, number)

    owned = [index for index in range(len(blocks)) if index in members]
    return param_group(None), [
        (model.get_submodule(blocks[index]), param_group(index)) for index in owned
    ]


def reduce_together(param_groups: Sequence[ParamGroup]) -> None:
    """Do what :meth:`ParamGroup.reduce` does for several groups. Every rank must call this.

    The partial gradients that tensor-parallel ranks hold travel in one collective, whatever group
    they are of: they are small and many.
    """
    grads: dict[ShardedParameter, Tensor] = {}
    params_of: list[tuple[ParamGroup, list[ShardedParameter]]] = []
    for param_group in param_groups:
        taken = param_group.take_grads()
        params_of.append((param_group, list(taken)))
        grads |= taken
    partial = [param for param in grads if param.partial_over_tp]
    if partial:
        param_groups[0].sum_copies(partial, grads, "tp")
    for param_group, params in params_of:
        # Popped, so that a whole gradient is let go of as soon as its shard is known.
        param_group.reduce_over_data({param: grads.pop(param) for param in params})


def _by_dtype(params: Sequence[ShardedParameter]) -> list[list[ShardedParameter]]:
    groups: dict[torch.dtype, list[ShardedParameter]] = {}
    for param in params:
        assert param.unsharded is not None
        groups.setdefault(param.unsharded.dtype, []).append(param)
    return list(groups.values())


def _unsharded_data(param: ShardedParameter) -> Tensor:
    assert param.unsharded is not None
    # Not detach(): writing must not count as a change of a tensor that backward saved.
    return param.unsharded.data


def _allocate(param: ShardedParameter) -> None:
    data = _unsharded_data(param)
    storage = data.untyped_storage()
    if storage.size() == 0:
        storage.resize_(data.numel() * data.element_size())


def _chunk(param: ShardedParameter, ranks: int) -> torch.Size:
    """Return the shape of the largest shard, to which all are padded."""
    assert param.unsharded is not None
    assert param.shard_dim is not None
    shape = list(param.unsharded.shape)
    shape[param.shard_dim] = -(-shape[param.shard_dim] // ranks)
    return torch.Size(shape)


def _padded(local: Tensor, chunk: torch.Size) -> Tensor:
    if local.shape == chunk:
        return local.reshape(-1)
    whole = local.new_zeros(chunk)
    whole[tuple(slice(size) for size in local.shape)] = local
    return whole.view(-1)


def _join(parts: Tensor, target: Tensor, dim: int) -> None:
    """Copy the shards of all ranks, (ranks, *chunk), into the whole tensor.

    Not one view or cat: shards of a dim other than the first are strided in the whole, and the
    padding of the last ranks, which may be all of a shard, must be left out.
    """
    step = parts.shape[dim + 1]
    for rank, part in enumerate(parts.unbind()):
        size = min(step, target.shape[dim] - rank * step)
        if size > 0:
            target.narrow(dim, rank * step, size).copy_(part.narrow(dim, 0, size))


def _rows(grad: Tensor, dim: int, chunk: torch.Size, ranks: int) -> Tensor:
    """Split a whole gradient into one padded row per rank: (ranks, chunk numel).

    The inverse of :func:`_join`. Padding is summed along, and left out afterwards.
    """
    step = chunk[dim]
    rows = grad.new_zeros(ranks, *chunk)
    for rank in range(ranks):
        size = min(step, grad.shape[dim] - rank * step)
        if size > 0:
            rows[rank].narrow(dim, 0, size).copy_(grad.narrow(dim, rank * step, size))
    return rows.view(ranks, -1)


def _unflatten(
    flat: Tensor, params: Sequence[ShardedParameter], grads: dict[ShardedParameter, Tensor]
) -> None:
    start = 0
    for param in params:
        shape = grads[param].shape
        grads[param] = flat[start : start + shape.numel()].view(shape)
        start += shape.numel()


def settle(param: ShardedParameter) -> None:
    """Cut a gradient that autograd gave the sharded parameter itself as the parameter is cut."""
    sharded: Any = param.sharded
    grad: Any = sharded.grad
    if isinstance(grad, DTensor) and tuple(grad.placements) != tuple(sharded.placements):
        sharded.grad = grad.redistribute(placements=sharded.placements)


def accumulate(param: ShardedParameter, grad: Tensor, scale: Tensor | None) -> None:
    """Add a reduced gradient to a parameter's ``.grad``, as autograd does, hooks included."""
    if scale is not None:
        grad = grad * scale.to(grad.dtype)
    sharded: Any = param.sharded
    total: Any = DTensor.from_local(
        grad.contiguous(), sharded.device_mesh, sharded.placements, shape=sharded.shape
    )
    for hook in (sharded._backward_hooks or {}).values():
        changed = hook(total)
        total = total if changed is None else changed
    if sharded.grad is None:
        sharded.grad = total
    else:
        sharded.grad.add_(total)
    for hook in (sharded._post_accumulate_grad_hooks or {}).values():
        hook(sharded)
