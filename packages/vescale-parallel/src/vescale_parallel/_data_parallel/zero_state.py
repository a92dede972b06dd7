"""ZeRO: when the parameters of a model are gathered and shown, and its gradients reduced.

[Note: which parameters hang on the modules]
Outside of forward and backward the modules hold DTensors of global shape. While either runs they
hold the plain, unsharded ones of this rank. Under ZeRO 2 and 3 a block shows its plain ones only
while it runs itself: outside of that they may be freed, or a gradient for them may come after they
were reduced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import announced_failures, profiler_range
from vescale_parallel._parameters.asked_gradients import AskedGradients
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._parameters.stale_graphs import StaleGraphs
from vescale_parallel._torch_private import as_written, call_after_backward, is_in_backward

from .block_hooks import BlockHooks, PartsOfBlocks
from .end_of_pass import EndOfPass
from .forward_writes import ForwardWrites
from .gathered_once import GatheredOnce
from .open_blocks import OpenBlocks
from .param_group import ParamGroup, reduce_together
from .prefetch import Prefetch
from .public_gradients import hand_over, refuse_stray_gradients
from .unsynced import UnsyncedGradients, scale_gradients


class ZeroState:
    """The parameters of one rank of a parallelized model, through forward and backward.

    Args:
        mesh: The plan's mesh.
        params: Every parameter.
        root: Those outside of blocks.
        blocks: The blocks that this rank runs, with theirs; hooks are added to them.
        stage: 1, 2 or 3: whether gradients are reduced as soon as a block has them, and whether
            its parameters are freed.
        sums_first: Whether all gradients of a step are summed on a rank, and then reduced once.
        prefetch: How many blocks are gathered ahead under stage 3.
        runs_again: Whether blocks run again in backward.

    Attributes:
        while_backward: Makes what is entered while backward runs.
        after_backward: Called after every pass, with its loss' factor if that comes after it.
        asked: Gradients that programs ask for, by ``inputs=`` or ``autograd.grad``.
        writes: Of forward, to parameters.
        rows_are_coupled: Whether backward through some call has collectives of data-parallel
            ranks itself.
        syncs: Whether backward passes reduce gradients; see [Note: gradients that are not ...].
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        params: Sequence[ShardedParameter],
        root: ParamGroup,
        blocks: Sequence[tuple[nn.Module, ParamGroup]],
        *,
        stage: int,
        sums_first: bool,
        prefetch: int = 0,
        runs_again: bool = False,
    ) -> None:
        self.params, self._root = params, root
        self._param_groups = [param_group for _, param_group in blocks]
        self._exchanges, self._reductions = root.exchanges, root.reductions
        self.while_backward: Callable[[], Any] = contextlib.nullcontext
        self.after_backward: Callable[[Tensor | None], None] = lambda factor: None
        self._in_backward, self._num_backwards, self._num_reduced = False, 0, 0
        self._entered, self._open = contextlib.ExitStack(), OpenBlocks(self._leave_blocks)
        self._reduces_early, self._frees = stage >= 2 and not sums_first, stage == 3
        self._gathers, self._parts = Prefetch(prefetch), PartsOfBlocks()
        groups = (root, *self._param_groups)
        self.writes = ForwardWrites(groups, runs_again=runs_again)
        self._gathered_first = (root,) if self._frees else groups
        self._kept = GatheredOnce(mesh, groups, are_freed=self._frees)
        self.stale_graphs = StaleGraphs(params)
        within = {*self.params_of_blocks} if self._frees or self._reduces_early else set()
        self._unguarded = [param for param in params if param not in within]
        if within:
            # Otherwise all ranks exchange in one order, whatever they run.
            self._exchanges.with_gathers = self._frees
            self._exchanges.with_reductions = self._reduces_early
            for module, param_group in blocks:
                BlockHooks(
                    module,
                    param_group.params,
                    before_forward=partial(self._enter_forward_of, param_group),
                    runs_again=partial(self._runs_again, param_group),
                    after_forward=partial(self._leave_forward_of, param_group),
                    before_backward=partial(self._enter_backward_of, param_group),
                    is_ready=lambda group=param_group: not (self._frees and group.is_freed),
                    num_backwards=lambda: self._num_backwards,
                    frees=self._frees,
                    parts=self._parts,
                ).install()
        # Otherwise a block's gradients are reduced, and their memory freed, soon after.
        self._writes = not sums_first and not self._reduces_early
        # On every rank, whichever of its gradients come first.
        self._order = [*reversed(self._param_groups), root]
        self._end = EndOfPass(mesh, params, self._order, self._exchanges if within else None)
        self.rows_are_coupled, self.syncs = any(param.is_expert for param in params), True
        self._unsynced = UnsyncedGradients(self._order)
        self.asked = AskedGradients(params, lambda: self._reduces_at_once)
        # Of one pass, or call: groups that were reduced, and whether some were held back.
        self._reduced_early, self._held_back = list[ParamGroup](), False
        if self._writes:
            for param_group in self._order:
                param_group.write_as_they_come(self._reduce_complete)

    @property
    def params_of_blocks(self) -> list[ShardedParameter]:
        """The parameters of blocks."""
        return [param for param_group in self._param_groups for param in param_group.params]

    @property
    def gathers_in_forward(self) -> bool:
        """Whether data-parallel ranks need each other for a forward pass alone."""
        return any(p.is_expert or (p.place is not None and p.place.is_cut) for p in self.params)

    def recover(self) -> None:
        """Drop what a backward pass left that raised; refuse other gradients."""
        self._reduced_early, self._held_back = [], False
        failed, self._in_backward = self._in_backward, False
        if failed:
            self._entered.close()
            self._open.forget()
            self._show_sharded()
            self._num_reduced = 0
            self._exchanges.forget()
            for param_group in self._order:
                param_group.forget()
            self._unsynced.lose()
        self._gathers.abandon()
        self._reductions.abandon()
        refuse_stray_gradients(self.params)

    def begin_forward(self) -> None:
        """Show plain parameters, gathered but for blocks that are gathered as they run."""
        self._parts.begin_forward()
        self._show_unsharded()
        self._gathers.let_go_of_kept()
        self._exchanges.begin_forward()
        if self._unsynced.num_passes and torch.is_grad_enabled():
            self._unsynced.open()
        self._kept.gather()
        if self._frees:
            self._root.gather()
        self.writes.begin(*self._gathered_first)
        self._gathers.begin(("forward", torch.is_grad_enabled()))

    def end_forward(self) -> None:
        """Show distributed parameters again."""
        self._parts.end_forward()
        self._gathers.end()
        self._reductions.stream.settle()
        self._show_sharded()
        self.writes.keep(*self._gathered_first)
        self.stale_graphs.note()
        if self._frees and not torch.is_grad_enabled():
            self._gathers.let_go_without_backward(self._root)
            if sys.exception() is None:  # else other ranks may come to no comparison
                self._end.compare_gathers()

    def tell_changed(self, publics: Sequence[object]) -> None:
        """Say that public parameters were written, on all ranks alike."""
        self.stale_graphs.tell_changed(publics)
        self._kept.tell_changed(publics)
        for param_group in self._order:
            param_group.tell_changed()

    def refuse_stray_gradients(self) -> None:
        """Raise if parameters have gradients that no backward pass of a call has summed."""
        if not self._in_backward:
            refuse_stray_gradients(self.params)
            self._unsynced.refuse()

    def watch(self, output: Tensor) -> None:
        """Have backward through a tensor begin with this rank's parameters at their place."""
        output.register_hook(self._begin_backward)

    def end_microbatch(self) -> None:
        """Be ready for the next forward and backward within one call."""
        self._num_backwards += 1
        self._open.leave()

    @property
    def used_early(self) -> set[ShardedParameter]:
        """Parameters with a gradient on this rank, of what was reduced in this call."""
        return set().union(*(each.used for each in self._reduced_early))

    def reduce_stage(self, stage: int, microbatch: int | None) -> None:
        """Begin to reduce a stage of a pipeline; not what others add to. Every rank must call."""
        own = [p for p in self._order if {each.stages for each in p.params} == {(stage,)}]
        if microbatch is not None:  # the other blocks were when backward had left them
            self.end_microbatch()
            own = [p for p in own if p is self._root]
        held_back = self.rows_are_coupled or self._unsynced.num_passes or not self.syncs
        if own and self._end.has_copies and not held_back:
            reduce_together(own)
            self._reduced_early += own

    def take_reduced(self) -> Callable[[], None]:
        """Take away gradients that were reduced already; return what puts them back."""
        aside = [each.set_aside() for each in self._order]
        early, self._reduced_early = self._reduced_early, []
        held_back, self._held_back = self._held_back, False

        def put_back() -> None:
            for put in aside:
                put()
            self._reduced_early, self._held_back = early, held_back

        return put_back

    def finish_backward(
        self, scale: Tensor | None, on_stages: Iterable[ShardedParameter] = ()
    ) -> None:
        """Reduce what is left, and add all to public parameters; stages used ``on_stages``."""
        factor, scale = scale, self._settle_unsynced(scale)
        if not self._reduces_now:
            return self._keep_unsynced(on_stages)
        left = self._left()
        with profiler_range("reduce gradients"):
            reduce_together(left)
            self._end.begin()
            self._reductions.finish()
        self._open.forget()
        self._reduced_early, self._held_back, self._num_reduced = [], False, 0
        self._num_backwards += 1
        self.after_backward(factor)
        self._show_sharded()
        used = self._end.used_anywhere({*self._unsynced.end_sync(), *on_stages})
        self._end.reduce_late(used)
        reduced = dict(item for each in self._order for item in each.take().items())
        self._free_all()
        self._root.buffers.trim()
        hand_over(used, reduced, scale, with_hooks=not self.asked.is_running)

    def _reduce_complete(self) -> None:
        """Reduce groups of parameters that have all their gradients, unless earlier ones wait."""
        if self.rows_are_coupled or not self._reduces_now:
            return  # ranks without a gradient would come to other collectives first
        with announced_failures():
            while self._num_reduced < len(self._order):
                if not self._order[self._num_reduced].is_written:
                    return
                self._order[self._num_reduced].reduce()
                self._num_reduced += 1

    def enter_backward(self) -> None:
        """Show plain parameters, gathered, for backward through graphs of calls."""
        self._in_backward = True
        for each in (as_written(), profiler_range("backward"), self.while_backward()):
            self._entered.enter_context(each)
        self._show_unsharded()
        if self._root.is_freed:
            self._root.gather()
        self._unsynced.look_for_dropped()
        if self._reduces_now:
            self._unsynced.begin_sync()
        self._gathers.begin("backward", [*reversed(self._gathers.order_of(("forward", True)))])
        if self._writes:
            for param_group in self._order:
                param_group.begin_writing()

    def leave_backward(self, on_stages: Iterable[ShardedParameter] = ()) -> None:
        """Reduce gradients, and show distributed parameters again; see `finish_backward`."""
        with announced_failures(), as_written():
            self._in_backward = False
            self._entered.close()
            self._gathers.end()
            self.finish_backward(None, on_stages)

    def _begin_backward(self, grad: Tensor | None = None) -> None:
        if not self._in_backward:
            self.enter_backward()
            call_after_backward(self.leave_backward)

    def _runs_again(self, param_group: ParamGroup) -> bool:
        # For its own backward pass, as torch.utils.checkpoint has it: it is ready for that.
        return param_group in self._open and is_in_backward()

    def _enter_forward_of(self, param_group: ParamGroup) -> None:
        if self._frees and not self._runs_again(param_group):
            self._gathers.need(param_group)
            self.writes.begin(param_group)
        param_group.show_unsharded()

    def _leave_forward_of(self, param_group: ParamGroup, *, has_backward: bool) -> None:
        param_group.show_sharded()
        if not self._frees:
            return
        self.writes.keep(param_group)
        if not has_backward:
            return self._gathers.let_go(param_group)
        return self._gathers.leave(param_group, keeps=not param_group.reshards)

    def _enter_backward_of(self, param_group: ParamGroup) -> None:
        """Get a block ready for its backward pass; the blocks after it have had theirs."""
        if not self._gathers.is_in_pass:  # from what a hook has kept, and no call returned
            self._begin_backward()
        if self._open.enter(param_group) and self._frees:
            self._gathers.need(param_group)
        param_group.show_unsharded()

    def _leave_blocks(self, blocks: list[ParamGroup]) -> None:
        if self._reduces_early:
            self._pass_on(blocks)
        for done in blocks:
            done.show_sharded()
            if self._frees:
                self._gathers.let_go(done)

    @property
    def _reduces_now(self) -> bool:
        return self.syncs or not self._end.has_copies

    @property
    def _reduces_at_once(self) -> bool:
        return self._reduces_now and not self._unsynced.num_passes

    def _pass_on(self, param_groups: Sequence[ParamGroup]) -> None:
        """Reduce, or keep, the gradients that backward is through with."""
        if not self._in_backward and not self._reduces_at_once:
            # Of a micro-batch: with which scale they are added is known when all have run.
            self._held_back = True
            return
        if not self._reduces_now:
            return self._unsynced.keep(param_groups)
        reduce_together(param_groups)
        self._reduced_early += param_groups

    def _left(self) -> list[ParamGroup]:
        """Return the groups that no reduction of this pass was of."""
        if not self._reduces_early and not self._reduced_early:
            return self._order[self._num_reduced :]
        if self._reduces_early and not self._unsynced.num_passes and not self._held_back:
            return [*self._open, *({self._root} - {*self._reduced_early})]
        # Also blocks through which this pass did not go.
        done = {*map(id, self._reduced_early)}
        done -= {*map(id, self._open if self._reduces_early else ())}
        return [each for each in self._order if id(each) not in done]

    def _settle_unsynced(self, scale: Tensor | None) -> Tensor | None:
        """Return what gradients are still multiplied with, once those of passes before are in."""
        if scale is None:
            return None
        self._unsynced.look_for_dropped()
        if self._reduces_at_once:
            return scale
        if self._reduced_early:
            raise ValueError(
                "a call ran outside of no_sync() and its backward() inside; put both inside. A "
                "pipeline, and batch.gradient_accumulation with ZeRO 2 or 3, reduce in the call"
            )
        scale_gradients(self.params, scale)
        if self._reduces_now:
            self._unsynced.begin_sync()
        return None

    def _keep_unsynced(self, on_stages: Iterable[ShardedParameter]) -> None:
        """Add the gradients of a pass to those of passes before on this rank."""
        self._reductions.finish()
        self._unsynced.used |= {*on_stages}
        self._unsynced.keep(self._order)
        self._open.forget()
        self._num_backwards += 1
        self._show_sharded()
        self._free_all()
        if self._frees:
            self._end.compare_gathers()
        self._unsynced.hide()

    def _free_all(self) -> None:
        self._gathers.let_go_of_kept()
        for param_group in self._order if self._frees and not self._gathers.holds_all() else ():
            param_group.free()

    def _show_unsharded(self) -> None:
        self.stale_graphs.look()
        for param in self.params:
            param.check_in_place()
        for param in self._unguarded:
            param.show_unsharded()

    def _show_sharded(self) -> None:
        for param in self.params:
            param.show_sharded()
