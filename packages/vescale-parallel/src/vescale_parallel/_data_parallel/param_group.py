"""ZeRO: gather the parameters of a block for compute, sum their gradients back to the owners.

A parameter group is a block of the model, or everything outside the blocks. Its parameters travel
together: one all-gather in, one reduce-scatter out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import all_reduce
from vescale_parallel._mesh.mesh import (
    DATA_AXES,
    axis_group,
    axis_size,
    data_size,
    gradient_groups,
)
from vescale_parallel._parameters.flat_layout import FlatShape, flat_layout
from vescale_parallel._parameters.flat_shards import FlatShards, allocate, release
from vescale_parallel._parameters.sent_shards import Offload, sent_from_host
from vescale_parallel._parameters.sharded_parameter import ShardedParameter

from .gathering import Gathering
from .gradient_rows import GradientBuffers, GradientRows
from .mix_up import Exchanges, gather_of, reduction_of
from .public_gradients import refuse_graphs
from .reductions import Reduction, Reductions, RunningSum


@dataclass(eq=False)
class ParamGroup:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        params: The parameters this rank computes with.
        mesh: The plan's mesh.
        param_dtype: Dtype of compute, None for each parameter's own.
        reduce_dtype: Dtype of gradient sums, None for the gradient's own.
        number: Tells groups apart.
        buffers: Those of the model's gradients.
        exchanges: What the groups of the model exchange, in order.
        reductions: Of the model's gradients, those under way.
        reshards: Whether it is freed between its forward and its backward pass.
        offload: What is on the host, None for nothing.
    """

    params: Sequence[ShardedParameter]
    mesh: DeviceMesh
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    number: int
    buffers: GradientBuffers
    exchanges: Exchanges
    reductions: Reductions
    reshards: bool = True
    offload: Offload | None = None
    _pending: dict[GradientRows, RunningSum] = field(
        default_factory=dict["GradientRows", RunningSum]
    )
    # What no other rank adds to.
    _alone: dict[ShardedParameter, Tensor] = field(
        default_factory=dict["ShardedParameter", Tensor]
    )
    _used: set[ShardedParameter] = field(default_factory=set["ShardedParameter"])
    _rows: dict[tuple[ShardedParameter, ...], dict[ShardedParameter, GradientRows]] = field(
        default_factory=dict[tuple[ShardedParameter, ...], dict[ShardedParameter, GradientRows]]
    )
    # Where gradients are written as autograd has them, while a backward pass runs; and of which
    # parameters it has none yet.
    _written_to: dict[ShardedParameter, GradientRows] = field(
        default_factory=dict[ShardedParameter, GradientRows]
    )
    _unwritten: set[ShardedParameter] | None = None

    def __post_init__(self) -> None:
        self._num_ranks = data_size(self.mesh)
        apart = [param for param in self.params if not param.shares_storage]
        self._copied = [param for param in apart if param.place is None]
        placed = {param: param.place.shards for param in apart if param.place is not None}
        self._flat = [*dict.fromkeys(placed.values())]
        self._filled = [param for param, shards in placed.items() if not shards.is_viewed]
        self._sent = None if self.offload is None else sent_from_host(self.offload, placed)
        self._gathering = Gathering(
            self._flat,
            [each for param in placed for each in (param.sharded, param.local)]
            + [shards.sent for shards in self._flat if shards.replicas > 1],
            axis_group(self.mesh, "dp_shard"),
            self.reductions.stream,
            self._begin_gather,
            self._sent,
        )

    def tell_changed(self) -> None:
        """Say that shards were written, on all ranks alike."""
        if self._sent is not None:
            self._sent.tell_changed()

    @property
    def has_replicas(self) -> bool:
        """Whether copies of the model share out its optimizer state."""
        return any(shards.replicas > 1 for shards in self._flat)

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
        self._pending, self._alone, self._used = {}, {}, set()
        self._written_to, self._unwritten = {}, None
        for rows in {rows for of_params in self._rows.values() for rows in of_params.values()}:
            rows.forget()
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None

    def start_gather(self) -> None:
        """Start what :meth:`gather` then waits for. Every dp_shard rank must call this."""
        self._gathering.start()

    def gather(self) -> None:
        """Fill unsharded parameters from sharded ones. Every dp_shard rank must call this."""
        for param in self._copied:
            allocate(param.unsharded_data)
            if param.local.numel():
                param.unsharded_data.copy_(param.local)
        self._gathering.finish()
        for param in self._filled:
            assert param.place is not None
            param.place.shards.fill(param.place.index, param.unsharded_data)
        for shards in self._flat:
            if not shards.is_viewed:
                shards.release_whole()

    def gather_sent(self) -> None:
        """Bring what :meth:`gather` sends up to date. Every dp_replicate rank must call this."""
        replicas = axis_group(self.mesh, "dp_replicate")
        if replicas is not None:
            self._gathering.gather_sent(replicas)

    def drop_gather(self) -> None:
        """Wait for what :meth:`start_gather` started, and give its memory back."""
        self._gathering.drop()

    def _begin_gather(self, group: dist.ProcessGroup, again: bool) -> None:
        if self.exchanges.with_gathers:
            self.exchanges.begin(gather_of(self.number, again=again), group)

    def free(self) -> None:
        """Give back the memory of gathered parameters."""
        self._gathering.free()
        for param in (*self._copied, *self._filled):
            release(param.unsharded_data)

    def reduce(self) -> None:
        """Sum gradients over ranks and keep this rank's shard. Every rank must call this.

        A parameter without gradient on this rank counts as zero: another rank may have one.
        The result is the mean over data-parallel ranks; :meth:`take` hands it out.
        """
        reduce_together([self])

    def write_as_they_come(self, when_complete: Callable[[], None]) -> None:
        """Have :meth:`begin_writing` take gradients from autograd, one after the other.

        ``when_complete`` is called when it has taken those of all parameters.
        """
        if self._is_alone:
            return
        for param in self.params:
            plain = param.unsharded
            if plain is None or param.partial_over_tp or not plain.is_floating_point():
                continue
            write = functools.partial(self._write, param, when_complete)
            with_gradient = plain.requires_grad
            plain.requires_grad_()  # or torch takes no hook
            plain.register_post_accumulate_grad_hook(write)
            plain.requires_grad_(with_gradient)

    def begin_writing(self) -> None:
        """Take gradients that autograd computes from now on; :meth:`reduce` ends it."""
        if not self._is_alone:
            self._written_to = self._rows_of(self._trained())
            self._unwritten = {*self._written_to}

    @property
    def is_written(self) -> bool:
        """Whether the gradients of all parameters were taken from autograd."""
        return self._unwritten is not None and not self._unwritten

    def _write(
        self, param: ShardedParameter, when_complete: Callable[[], None], plain: Tensor
    ) -> None:
        rows, grad, unwritten = self._written_to.get(param), plain.grad, self._unwritten
        if rows is None or grad is None or unwritten is None:
            return
        if grad.dtype != rows.dtype or grad.is_sparse:
            return
        refuse_graphs(param, grad)
        rows.add(param, grad)
        plain.grad = None
        self._used.add(param)
        unwritten.discard(param)
        if not unwritten:
            when_complete()

    def rows_to_add_to(self) -> dict[ShardedParameter, GradientRows]:
        """Return where gradients wait for :meth:`reduce`; nothing is taken from autograd now."""
        self._written_to, self._unwritten = {}, None
        return self._rows_of(self._trained())

    def take_grads(self) -> dict[ShardedParameter, Tensor]:
        """Take the gradients of the unsharded parameters.

        Zeros for one that has none, if ranks of another axis may have one.
        """
        taken: dict[ShardedParameter, Tensor] = {}
        for param in self._trained():
            assert param.unsharded is not None
            grad, param.unsharded.grad = param.unsharded.grad, None
            if grad is not None:
                self._used.add(param)
                refuse_graphs(param, grad)
                grad = grad.to_dense() if grad.is_sparse else grad
                # Cast as it is packed, but for what is summed before.
                taken[param] = grad.to(self._reduced_in(param)) if param.partial_over_tp else grad
            elif param.partial_over_tp:
                taken[param] = torch.zeros_like(param.unsharded, dtype=self._reduced_in(param))
        return taken

    def reduce_over_data(self, grads: dict[ShardedParameter, Tensor]) -> None:
        """Average gradients over data-parallel ranks, with those written; keep this rank's shard.

        ``grads`` are let go of.
        """
        self._written_to, self._unwritten = {}, None
        if self._is_alone:
            for param, grad in grads.items():
                own = grad.to(self._reduced_in(param)).to(param.local.dtype)
                self._alone[param] = self._alone[param] + own if param in self._alone else own
            return
        together = [*dict.fromkeys(self._rows_of(self._trained()).values())]
        if together and self.exchanges.with_reductions:
            # Before reductions go on: ranks that wait in them answer those that come elsewhere.
            groups = gradient_groups(self.mesh, of_experts=False)
            self.exchanges.begin(reduction_of(self.number), *groups)
        self.reductions.advance()
        for rows in together:
            # Popped, so that whole gradients are let go of as soon as the shard is known.
            rows.write({param: grads.pop(param) for param in rows.params if param in grads})
            self.reductions.start(self._reduction(rows))

    def _reduction(self, rows: GradientRows) -> Reduction:
        groups = gradient_groups(self.mesh, of_experts=rows.params[0].is_expert)
        mean = yield from rows.mean(*groups)
        arrived = None if self.offload is None else self.reductions.stream.mark()
        self._pending.setdefault(rows, RunningSum()).add(mean, arrived)

    def take(self) -> dict[ShardedParameter, Tensor]:
        """Return the reduced gradients since the last call, and forget them."""
        self.reductions.finish()
        taken, self._alone = self._alone, {}
        for rows, summed in self._pending.items():
            for param, shard in rows.unpack(summed.total()).items():
                taken[param] = taken[param] + shard if param in taken else shard
        self._pending = {}
        return taken

    def set_aside(self) -> Callable[[], None]:
        """Forget what was reduced and used so far; return what puts it back."""
        self.reductions.finish()
        pending, self._pending = self._pending, {}
        alone, self._alone = self._alone, {}
        used = self.take_used()

        def put_back() -> None:
            self._pending, self._alone, self._used = pending, alone, used

        return put_back

    @property
    def used(self) -> frozenset[ShardedParameter]:
        """What :meth:`take_used` takes."""
        return frozenset(self._used)

    def take_used(self) -> set[ShardedParameter]:
        """Return the parameters that had a gradient on this rank since the last call."""
        used, self._used = self._used, set()
        return used

    @property
    def _is_alone(self) -> bool:
        """Whether gradients stay what and where they are."""
        return self._num_ranks == 1 and self.offload is None

    def _trained(self) -> tuple[ShardedParameter, ...]:
        return tuple([param for param in self.params if param.sharded.requires_grad])

    def _rows_of(
        self, params: tuple[ShardedParameter, ...]
    ) -> dict[ShardedParameter, GradientRows]:
        if params not in self._rows:  # others than before if some were frozen since
            self._rows[params] = {
                param: rows for rows in self._grouped(params) for param in rows.params
            }
        return self._rows[params]

    def _grouped(self, params: Sequence[ShardedParameter]) -> list[GradientRows]:
        placed: dict[FlatShards, list[tuple[ShardedParameter, int]]] = {}
        for param in params:
            if param.place is not None:
                placed.setdefault(param.place.shards, []).append((param, param.place.index))
        grouped, order = list[GradientRows](), self.reductions.order
        for shards, members in placed.items():
            own, places = zip(*members, strict=True)
            dtype = self._reduced_in(own[0])
            how = shards.rank, dtype, self.buffers, order, self._num_ranks
            grouped.append(GradientRows(own, places, shards.layout, *how))
        # Of copies every rank sums a part, whichever of two axes it shares them on.
        multiple = math.lcm(*(axis_size(self.mesh, axis) for axis in DATA_AXES))
        for same in _by_dtype([param for param in params if param.place is None]):
            dtype = self._reduced_in(same[0])
            shapes = tuple(FlatShape(tuple(param.unsharded_data.shape)) for param in same)
            layout = flat_layout(shapes, 1, dtype.itemsize, multiple)
            how = 0, dtype, self.buffers, order, self._num_ranks
            grouped.append(GradientRows(same, range(len(same)), layout, *how))
        return grouped

    def _reduced_in(self, param: ShardedParameter) -> torch.dtype:
        assert param.unsharded is not None
        return self.reduce_dtype or param.unsharded.dtype

    def sum_copies(
        self, params: list[ShardedParameter], grads: dict[ShardedParameter, Tensor], axis: str
    ) -> None:
        """Sum gradients over the ranks of a mesh axis, in rank order."""
        group = axis_group(self.mesh, axis)
        if group is None:
            return
        for same in _by_dtype(params):
            flat = torch.cat([grads[param].reshape(-1) for param in same])
            parts = all_reduce(flat, group).split([grads[param].numel() for param in same])
            for param, part in zip(same, parts, strict=True):
                grads[param] = part.view(grads[param].shape)


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
        param_group.reduce_over_data({param: grads.pop(param) for param in params})


def _by_dtype(params: Sequence[ShardedParameter]) -> list[list[ShardedParameter]]:
    """Return parameters of one dtype together: in compute, and as they are kept; experts apart."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[ShardedParameter]] = {}
    for param in params:
        key = param.unsharded_data.dtype, param.local.dtype, param.is_expert
        groups.setdefault(key, []).append(param)
    return list(groups.values())
