"""Run a schedule: stages, what they send each other, and the loss that all of them report."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._cross_replica.borders import Rows
from vescale_parallel._loss.loss_scale import LossScale
from vescale_parallel._loss.output import loss_called, only_scalars, without_graph
from vescale_parallel._mesh.mesh import axis_rank, second_group
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._plan.pipeline_schedules import rule_of
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._rng.stage_draws import StageDraws
from vescale_parallel._torch_private import pytree

from .cuts.seen_call import SeenCall
from .cuts.values import Cuts
from .execution import (
    Execution,
    Links,
    LossRoots,
    NoRoots,
    OutputRoots,
    Roots,
    activations_on_host,
    operations_of_passes,
    operations_of_step,
    signature_of,
    split_refusal,
)
from .microbatches import Parts, num_rows_of, rows_of_parts, split_batch
from .outputs.agreed import AgreedOutputs
from .outputs.joined import (
    Returned,
    common_num_microbatches,
    grads_of_parts,
    joined,
    num_microbatches_for,
)
from .schedules.messages import Operation, channels_of
from .stage_calls import StageCalls
from .stage_module import Receive, Staging

# Runs the backward passes of a step, given the gradients of what forward returned; returns which
# parameters have a gradient on each rank of the pipeline, see :attr:`AgreedOutputs.flags`.
RunBackward = Callable[[Sequence[Tensor | None]], Tensor]


@dataclass(eq=False)
class Pipeline:
    """One rank of a pipeline.

    Attributes:
        plan: The plan.
        mesh: Its mesh, with a ``pp`` axis.
        staging: Shared with the staged modules of the model.
        starts: Index of the first block of every stage.
        num_blocks: Number of blocks.
        total: Sums a float64 tensor over data-parallel ranks.
        num_ranks: How many these are, with those that share sequences.
        draws: Random numbers in forward; None leaves them to each stage.
        trained: Of every parameter, the same on all ranks, whether it is trained now.
        loss_scale: What losses are multiplied with before they are differentiated.
        reduce: Begins to sum a stage's gradients over data-parallel ranks, in a schedule: those
            of a micro-batch, None for all.
        stays: Returns this rank's plain parameters, and its buffers.
    """

    plan: ParallelPlan
    mesh: DeviceMesh
    staging: Staging
    starts: Sequence[int]
    num_blocks: int
    total: Callable[[Tensor], Tensor]
    num_ranks: int
    draws: StageDraws | None = None
    trained: tuple[bool, ...] = ()
    loss_scale: LossScale = field(default_factory=LossScale)
    reduce: Callable[[int, int | None], None] = lambda *_: None
    stays: Callable[[], Iterable[Tensor]] = tuple
    _said_whole: bool = False
    _parts: Parts = field(default_factory=lambda: Parts(1, (1,)))

    def __post_init__(self) -> None:
        self._placement = self.plan.pipeline_parallel.placement
        self._rank = axis_rank(self.mesh, "pp")
        # See [Note: channels without tags]. None is the mesh's own group, whose sends and
        # receives wait for torch's half hour whatever the default group's timeout is.
        num_channels = max(2, 1 + max(channels_of(self._placement).values(), default=0))
        groups = [second_group(self.mesh, "pp") for _ in range(num_channels)]
        device = torch.device(self.mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.links = Links(groups, device)
        offloads = self.plan.pipeline_parallel.offload_activations
        self._on_host = activations_on_host(device, lambda: self.stays()) if offloads else None
        self.calls = StageCalls(
            self.staging,
            self.starts,
            self.num_blocks,
            self.mesh.device_type,
            self._rank == self._placement.last_rank,
            self.total,
            self._agree,
        )
        self._loss_of = loss_called(self.plan.pipeline_parallel.loss)
        if self.draws is not None:
            self.draws.meet(self.group_of("F"))
        self.outputs = AgreedOutputs(
            self.mesh,
            self.group_of("F"),
            self._placement.last_rank,
            only_last=self.plan.pipeline_parallel.outputs == "last",
        )

    def group_of(self, kind: Literal["F", "B"]) -> dist.ProcessGroup:
        """Return the ranks of this pipeline, for what is sent before its passes or after them."""
        return self.links.groups["FB".index(kind)]

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None = None,
        returned: Returned | None = None,
        *,
        form: object = None,
    ) -> Any:
        """Run one step's schedule. Every rank must call this.

        Gradients are left in the unsharded parameters, for an incoming gradient of 1. ``forward``
        is the model's own call, of this rank's batch; ``rows`` says where the rows are in every
        leaf of it, None if that is not known, ``returned`` in what it returns. ``form`` is what
        else than the shapes of the batch may decide what is returned, see [Note: what is sent of
        outputs].

        Returns:
            The module's output with a :class:`Scalar` for each scalar of the whole batch, and
            other tensors where the plan's ``outputs`` says so, else :class:`NotReturned`.
        """
        count, num_rows = self.plan.num_microbatches, num_rows_of(args, kwargs, rows) or 0
        microbatches = split_batch(args, kwargs, count, rows, may_be_uneven=True)
        self._parts = Parts(self.num_ranks, rows_of_parts(num_rows, count))
        seen = self.seen(forward, args, kwargs, rows, form=form)
        cuts, report = seen.cuts, functools.partial(only_scalars, where="nowhere")
        if self.plan.pipeline_parallel.outputs is not None:
            cuts = seen.all_cuts
            report = functools.partial(pytree.tree_map_only, Tensor, without_graph)
        counts = self.calls.count(forward, microbatches, form, seen)
        roots = LossRoots(
            self._loss_of, self._parts.shares or len(microbatches), self.loss_scale.value
        )
        execution = self._execution(forward, microbatches, cuts, counts, report, roots)
        pipeline = self.plan.pipeline_parallel
        order = pipeline.schedule, self._rank, self._placement, count, pipeline.reduce_every
        outputs = self._execute(execution, operations_of_step(*order), microbatches, form)
        told: tuple[Any, list[Tensor]] = (None, [])
        if outputs:
            told = joined(outputs, returned, self._parts.sizes, self._mean, self._loss_of)
        return self._agree((form, signature_of((args, kwargs))), *told, self.outputs.own_flags())

    def predict(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None = None,
        returned: Returned | None = None,
        *,
        form: object = None,
    ) -> Any:
        """Run forward passes alone, as :meth:`run` otherwise, without gradients.

        What it returns has tensors, too; see [Note: what prediction costs]. ``returned`` is where
        the rows are in it; None runs the batch in one piece.
        """
        num_rows = num_rows_of(args, kwargs, rows) or 0
        most = self.plan.num_microbatches
        count = num_microbatches_for(num_rows, 1 if returned is None else most)
        if self.num_ranks > 1 and self.plan.data_parallel.zero_stage == 3:
            # Ranks gather parameters together, once for each micro-batch of each.
            count = common_num_microbatches(
                num_rows, count, most, self.num_ranks, self.total, self.mesh.device_type
            )
        passes = self._run_forward(forward, args, kwargs, rows, returned, count, NoRoots(), form)
        return passes[0]

    def run_apart(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None = None,
        returned: Returned | None = None,
        *,
        form: object = None,
    ) -> tuple[Any, RunBackward]:
        """Run forward passes, and backward passes when the program asks for them.

        For a loss that the program computes from what the model returns, see
        [Note: losses of the program]. Arguments are those of :meth:`predict`.

        Returns:
            The module's output, of which tensors require a gradient that depend on parameters;
            and what runs the backward passes, given the gradients of these tensors. Every rank
            must call it.
        """
        count = 1 if returned is None else self.plan.num_microbatches
        roots = OutputRoots()
        output, execution, outputs = self._run_forward(
            forward, args, kwargs, rows, returned, count, roots, form
        )
        parts = self._parts

        def run_backward(grads: Sequence[Tensor | None]) -> Tensor:
            if outputs:
                roots.grads = grads_of_parts(grads, outputs, returned, parts.sizes)
            every = self.plan.pipeline_parallel.reduce_every
            order = operations_of_passes("B", self._rank, self._placement, count, every)
            execution.execute(order)
            return self.outputs.share_flags()

        return output, run_backward

    def _run_forward(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None,
        returned: Returned | None,
        count: int,
        roots: Roots,
        form: object,
    ) -> tuple[Any, Execution, list[Any]]:
        """Run the forward passes of ``count`` micro-batches; tell all stages what comes of them.

        Returns:
            The module's output; what ran; and on the last stage the output of each micro-batch.
        """
        num_rows = num_rows_of(args, kwargs, rows) or 0
        microbatches: list[tuple[Any, Any]] = [(args, kwargs)]
        if count > 1:
            microbatches = split_batch(args, kwargs, count, rows, may_be_uneven=True)
        self._parts = Parts(self.num_ranks, rows_of_parts(num_rows, count))
        seen = self.seen(forward, args, kwargs, rows, form=form)
        counts = self.calls.count(forward, microbatches, form, seen)
        report = functools.partial(pytree.tree_map_only, Tensor, without_graph)
        execution = self._execution(forward, microbatches, seen.all_cuts, counts, report, roots)
        operations = operations_of_passes("F", self._rank, self._placement, count)
        outputs = self._execute(execution, operations, microbatches, form)
        told: tuple[Any, list[Tensor]] = (None, [])
        if outputs:
            told = joined(outputs, returned, self._parts.sizes, self._mean)
        output = self._agree((form, signature_of((args, kwargs))), *told)
        return output, execution, outputs

    def seen(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None = None,
        *,
        form: object = None,
    ) -> SeenCall:
        """Return what is seen of calls of a form, in the first one. Every rank must call this."""

        def first() -> tuple[Any, Any]:
            num_rows = num_rows_of(args, kwargs, rows) or 0
            count = num_microbatches_for(num_rows, self.plan.num_microbatches)
            return split_batch(args, kwargs, count, rows)[0] if count > 1 else (args, kwargs)

        return self.calls.seen(form, forward, first)

    def _execution(
        self,
        forward: Callable[..., Any],
        microbatches: Sequence[tuple[Any, Any]],
        cuts: Cuts,
        counts: Sequence[Tensor],
        report: Callable[[Any], Any],
        roots: Roots,
    ) -> Execution:
        draws, parts = self.draws, self._parts
        loss_of = self._loss_of if isinstance(roots, LossRoots) else None

        def run(stage: int, microbatch: int, receive: Receive) -> Any:
            given, num_parts = microbatches[microbatch], parts.num_like(microbatch)
            with draws.of_pass(stage, microbatch) if draws else contextlib.nullcontext():
                return self.calls.run(
                    stage, cuts, receive, forward, given, num_parts, counts, loss_of
                )

        crossing = tuple(cuts.get(start, ()) for start in self.starts[1:])
        signatures = [signature_of(each) for each in microbatches]
        return Execution(
            self.links,
            len(self.starts),
            [(crossing, self.trained, each) for each in signatures],
            run,
            report,
            roots,
            loss_of is not None and self._may_split(),
            self._say_whole,
            self.reduce,
            self._on_host,
        )

    def _execute(
        self,
        execution: Execution,
        operations: Sequence[Operation],
        microbatches: Sequence[tuple[Any, Any]],
        form: object,
    ) -> list[Any]:
        """Run forward passes, and others among them; return what the last stage reports."""
        signatures = [signature_of(each) for each in microbatches]
        draws = self.draws.of_step(microbatches, form, signatures) if self.draws else None
        with draws or contextlib.nullcontext():
            outputs = execution.execute(operations)
        self.calls.check_counts()
        return outputs

    def _may_split(self) -> bool:
        """Whether input and weight gradients are computed apart."""
        if not rule_of(self.plan.pipeline_parallel.schedule).splits_backward:
            return False
        refusal = split_refusal(self.plan)
        if refusal is not None:
            self._say_whole(self._placement.stages_of(self._rank)[-1], refusal)
        return refusal is None

    def _say_whole(self, stage: int, refusal: str) -> None:
        if not self._said_whole:
            self._said_whole = True
            warn_at_user_line(
                f"pipeline_parallel.schedule {self.plan.pipeline_parallel.schedule!r} computes "
                "gradients of inputs and of weights apart. Stage "
                f"{stage} computes them together, with the same result and a larger bubble: "
                f"{refusal}",
            )

    def _agree(self, form: object, told: Any, *more: Any) -> Any:
        """Give all stages what the last one has: a structure, with :class:`Sent` for tensors."""
        return self.outputs.share(form, told, *more)

    def _mean(self, scalars: Sequence[Tensor]) -> Tensor:
        """Return the mean of a scalar over the micro-batches of all data-parallel ranks."""
        return self._parts.mean(scalars, self.total)
