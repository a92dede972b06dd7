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
from vescale_parallel._loss.token_mean import TokenCounts, TokenMeans
from vescale_parallel._mesh.mesh import axis_rank, second_group
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._plan.pipeline_schedules import rule_of
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._plan.recomputation import recomputes
from vescale_parallel._rng.stage_draws import StageDraws
from vescale_parallel._torch_private import pytree

from .agreed_outputs import AgreedOutputs
from .cuts.hooks import hooks_where_real
from .cuts.placeholders import Placeholder
from .cuts.seen_call import SeenCall, seen_call
from .cuts.values import Cuts, ObservedValues
from .execution import Execution, Links, activations_on_host, operations_of_step, signature_of
from .microbatches import Parts, num_rows_of, rows_of_parts, split_batch
from .predict import Returned, common_num_microbatches, joined, num_microbatches_for
from .schedules.messages import channels_of
from .stage_module import Receive, StageDone, StageRun, Staging
from .targets import SeenCounts, TargetCounts, run_counting, summed_counts


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
    _forms_seen: dict[object, SeenCall] = field(default_factory=dict[object, "SeenCall"])
    _checked_loss: bool = False
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
        self._counts = TargetCounts(self._run_counting)
        self._seen = SeenCounts(
            is_delayed=device.type != "cpu", otherwise="pipeline_parallel.size 1"
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
        seen = self._seen_in(form, forward, args, kwargs, rows)
        schedule = self.plan.pipeline_parallel.schedule
        cuts, report = seen.cuts, functools.partial(only_scalars, where="nowhere")
        if self.plan.pipeline_parallel.outputs is not None:
            cuts = seen.all_cuts
            report = functools.partial(pytree.tree_map_only, Tensor, without_graph)
        counts = self._count(forward, microbatches, form, seen)
        outputs = self._execute(schedule, forward, microbatches, cuts, counts, report, form)
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
        microbatches: list[tuple[Any, Any]] = [(args, kwargs)]
        num_rows = num_rows_of(args, kwargs, rows) or 0
        most = self.plan.num_microbatches
        num_microbatches = num_microbatches_for(num_rows, 1 if returned is None else most)
        if self.num_ranks > 1 and self.plan.data_parallel.zero_stage == 3:
            # Ranks gather parameters together, once for each micro-batch of each.
            num_microbatches = common_num_microbatches(
                num_rows, num_microbatches, most, self.num_ranks, self.total, self.mesh.device_type
            )
        if num_microbatches > 1:
            microbatches = split_batch(args, kwargs, num_microbatches, rows)
        self._parts = Parts(self.num_ranks, rows_of_parts(num_rows, num_microbatches))
        seen = self._seen_in(form, forward, args, kwargs, rows)
        counts = self._count(forward, microbatches, form, seen)
        cuts = seen.all_cuts
        outputs = self._execute(
            None, forward, microbatches, cuts, counts, lambda output: output, form
        )
        told: tuple[Any, list[Tensor]] = (None, [])
        if outputs:
            told = joined(outputs, returned, self._parts.sizes, self._mean)
        return self._agree((form, signature_of((args, kwargs))), *told)

    def returns_loss(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None = None,
        *,
        form: object = None,
    ) -> bool:
        """Whether forward returns a scalar for a batch. Every rank must call this."""
        return self._seen_in(form, forward, args, kwargs, rows).has_loss

    def _seen_in(
        self,
        form: object,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None,
    ) -> SeenCall:
        """Return what the last stage sees in the first call of a form, and tells the others."""
        if form in self._forms_seen:
            return self._forms_seen[form]
        num_rows = num_rows_of(args, kwargs, rows) or 0
        count = num_microbatches_for(num_rows, self.plan.num_microbatches)
        first = split_batch(args, kwargs, count, rows)[0] if count > 1 else (args, kwargs)
        seen, failed = None, None
        if self._has_last_stage:
            # What a model's own code raises the other ranks would wait for.
            try:
                seen = self._look(forward, first)
            except Exception as error:
                failed = error
        seen = self._agree(("what is in a call", form), seen)
        if failed is not None:
            raise failed
        if seen is None:
            self._look(forward, first)
            raise ValueError(
                "forward raised an error on the last stage of a pipeline and on no other one, "
                "when it was run with placeholders; see what that rank says"
            )
        self._forms_seen[form] = seen
        return seen

    def _look(self, forward: Callable[..., Any], microbatch: tuple[Any, Any]) -> SeenCall:
        run = functools.partial(self._run_counting, forward, microbatch)
        return seen_call(run, self.starts[-1])

    def _execute(
        self,
        schedule: str | None,
        forward: Callable[..., Any],
        microbatches: Sequence[tuple[Any, Any]],
        cuts: Cuts,
        counts: Sequence[Tensor],
        report: Callable[[Any], Any],
        form: object,
    ) -> list[Any]:
        """Do what the schedule's list for this rank says, None being forward passes alone.

        Returns:
            What ``report`` keeps of the output of every micro-batch, on the last stage.
        """
        draws = self.draws

        def run(stage: int, microbatch: int, receive: Receive) -> Any:
            started = self._stage_run(stage, cuts, receive)
            with draws.of_pass(stage, microbatch) if draws else contextlib.nullcontext():
                return self._run_stage(started, forward, microbatches, microbatch, counts)

        crossing = tuple(cuts.get(start, ()) for start in self.starts[1:])
        signatures = [signature_of(each) for each in microbatches]
        execution = Execution(
            self.links,
            len(self.starts),
            [(crossing, self.trained, each) for each in signatures],
            run,
            report,
            self._loss_of,
            schedule is not None and self._may_split(schedule),
            self.loss_scale.value,
            self._say_whole,
            self._parts.shares,
            self.reduce,
            self._on_host,
        )
        step = draws.of_step(microbatches, form, signatures) if draws else None
        with step or contextlib.nullcontext():
            every = self.plan.pipeline_parallel.reduce_every
            order = schedule, self._rank, self._placement, len(microbatches), every
            outputs = execution.execute(operations_of_step(*order))
        self._seen.check()
        return outputs

    def _stage_run(self, stage: int, cuts: Cuts, receive: Receive) -> StageRun:
        bounds = [*self.starts, self.num_blocks]
        first, end = bounds[stage], bounds[stage + 1]
        takes, sends = cuts.get(first, ()) if stage else (), cuts.get(end, ())
        last = stage == len(self.starts) - 1
        return StageRun(stage, first, end, last, receive, takes, sends)

    def _run_stage(
        self,
        run: StageRun,
        forward: Callable[..., Any],
        microbatches: Sequence[tuple[Any, Any]],
        index: int,
        counts: Sequence[Tensor],
    ) -> Any:
        """Return what a stage sends for a micro-batch; the last one what the module returns."""
        self.staging.run = run
        # Put back afterwards: a model may call another one.
        was_usable = Placeholder.usable
        # The first stage needs none: what it does not own comes later.
        Placeholder.usable = run.stage > 0
        known = functools.partial(self._known_count, run, counts)
        means, (args, kwargs) = TokenMeans(self._parts.num_like(index), known), microbatches[index]
        try:
            with run.running(), hooks_where_real(self.staging.around, run), means:
                output = forward(*args, **kwargs)
        except StageDone as done:
            return done.activations
        finally:
            self.staging.run = None
            Placeholder.usable = was_usable
        run.check_complete(self.num_blocks)
        if torch.is_grad_enabled() and not self._checked_loss:
            self._checked_loss = True
            means.warn_of_sums(self._loss_of(output))
        return output

    def _count(
        self,
        forward: Callable[..., Any],
        microbatches: Sequence[tuple[Any, Any]],
        form: object,
        seen: SeenCall,
    ) -> list[Tensor]:
        """Return what each token mean of the module counts over the global batch.

        Nothing on ranks whose stages compute none.

        Runs forward, where it has to, with placeholders for what every block and every other
        module with parameters returns, so that the targets of all micro-batches are known before
        the first backward pass.
        """
        if not self._has_last_stage and not seen.counts_early:
            return []
        found = [self._counts.of(forward, each, form) for each in microbatches]
        local = summed_counts(found, otherwise="pipeline_parallel.size 1")
        self._seen.expect(local if self._has_last_stage else ())
        return [self.total(count) for count in local]

    def _known_count(
        self, run: StageRun, counts: Sequence[Tensor], index: int, counted: Tensor
    ) -> Tensor:
        if index >= len(counts):
            raise ValueError(
                f"forward computed more means over targets, {index + 1}, than when its targets "
                "were counted: a block computes one, or forward does something else than in its "
                "first call of this form. Compute them in code around the blocks and in every "
                "call, or use pipeline_parallel.size 1"
            )
        if run.is_last:
            self._seen.add(index, counted)
        return counts[index]

    def _run_counting(
        self,
        forward: Callable[..., Any],
        microbatch: tuple[Any, Any],
        mode: TokenCounts | None,
        values: ObservedValues | None = None,
    ) -> Any:
        run, device = StageRun.counting(self.num_blocks, values), self.mesh.device_type
        with run.running(), hooks_where_real(self.staging.around, run):
            return run_counting(forward, microbatch, self.staging, run, device, mode)[0]

    @property
    def _has_last_stage(self) -> bool:
        return self._rank == self._placement.last_rank

    def _may_split(self, schedule: str) -> bool:
        """Whether input and weight gradients are computed apart."""
        if not rule_of(schedule).splits_backward:
            return False
        refusal = None
        if recomputes(self.plan.recompute):
            refusal = f"recompute={self.plan.recompute!r} would run blocks again for each part"
        elif self.plan.data_parallel.zero_stage == 3:
            refusal = "data_parallel.zero_stage 3 frees weights behind the first part"
        elif self.plan.pipeline_parallel.reduce_every == "microbatch":
            refusal = "pipeline_parallel.reduce_every 'microbatch' reduces block after block"
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
