"""Gradient accumulation inside of one call: a rank's rows in micro-batches, one after the other.

[Note: accumulation] It is a pipeline of one stage: each micro-batch runs forward and backward
before the next begins, so a rank has the activations of one. Where a loss is a mean over counted
targets, the count of the whole batch is found first, as pipelines do: in the first call of a form
with placeholders for what modules with parameters return, later without running forward, see
[Note: when counts are replayed]. A model that cannot run so is run without gradients instead.
Random numbers are those that one device draws for these rows of the whole batch: every
micro-batch begins from the same state of the generators, and draws its part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.borders import RowCoupling, Rows
from vescale_parallel._data_parallel.zero_state import ZeroState
from vescale_parallel._loss.loss_scale import LossScale
from vescale_parallel._loss.output import loss_of, marked_scalars, mean_of_parts, only_scalars
from vescale_parallel._loss.sum_ratios import ratios_to_count
from vescale_parallel._loss.token_mean import TokenCounts, TokenMeans
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._pipeline.buffers import StageBuffers
from vescale_parallel._pipeline.microbatches import split_batch
from vescale_parallel._pipeline.outputs.deferred_backward import with_deferred_backward
from vescale_parallel._pipeline.stage_module import StageRun, Staging, stage_module
from vescale_parallel._pipeline.targets import (
    Form,
    SeenCounts,
    TargetCounts,
    check_known,
    is_known,
    plain_attributes,
    run_counting,
    summed_counts,
)
from vescale_parallel._rng.drawn_again import GeneratorStates
from vescale_parallel._rng.sharded_rng import ShardedRng

_MicroBatch = tuple[tuple[Any, ...], Mapping[str, Any]]
_OTHERWISE = "batch.gradient_accumulation 1, and accumulate in the loop"


def let_count(model: nn.Module, staging: Staging, param_dtype: torch.dtype | None) -> None:
    """Let blocks and modules with parameters of their own be answered by placeholders, in place.

    Not larger modules, whose forward may compute the loss.
    """
    blocks = tuple(fqn for stack in block_stacks(model) for fqn in stack)
    inside = tuple(f"{fqn}." for fqn in blocks)
    chosen = [
        fqn
        for fqn, module in model.named_modules()
        if fqn in blocks or (fqn and not fqn.startswith(inside) and _is_leaf(module))
    ]
    for fqn in chosen:
        stage_module(
            model.get_submodule(fqn),
            staging,
            fqn=fqn,
            calls=None,
            stages=(0,),
            param_dtype=param_dtype,
        )


def _is_leaf(module: nn.Module) -> bool:
    children = any(True for child in module.children() for _ in child.parameters())
    return not children and any(True for _ in module.parameters())


@dataclass(eq=False, kw_only=True)
class AccumulatedStep:
    """Runs the calls of one rank that train.

    Attributes:
        num_microbatches: What a rank's batch is cut into.
        model: The model.
        device: Of the losses.
        parameters: Has them gathered, and reduces their gradients.
        ranks: Those that share a batch.
        rng: Random numbers in forward.
        staging: Shared with the modules that may be answered by placeholders.
        buffers: Those that forward changes, and attributes.
        loss_of: Returns the loss among what forward returns.
    """

    num_microbatches: int
    model: nn.Module
    device: str
    parameters: ZeroState
    ranks: DataRanks
    rng: ShardedRng
    staging: Staging
    buffers: StageBuffers
    loss_of: Callable[[Any], Tensor] = loss_of
    _counts_by_running: bool | None = None
    _said_running: bool = False
    _checked_loss: bool = False
    _are_counted: Sequence[bool] = ()
    _loss_scale: LossScale = field(default_factory=LossScale)

    def __post_init__(self) -> None:
        self._counts = TargetCounts(self._run_counting)
        self._seen = SeenCounts(is_delayed=self.device != "cpu", otherwise=_OTHERWISE)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Sequence[Rows | None] | None,
        check: Callable[[Any], None],
        are_counted: Sequence[bool] = (),
        *,
        knows_rows: bool = False,
    ) -> Any:
        """Run forward and backward on this rank's batch. Every rank must call this.

        Args:
            forward: The model's own call.
            args: Positional arguments: this rank's batch.
            kwargs: Keyword arguments, likewise.
            rows: Where the rows are in every leaf of these; None if that is not known.
            check: Raises for an output of a micro-batch that is no result of this rank.
            are_counted: See :class:`.SumRatios`.
            knows_rows: Whether it was checked that losses are means over rows.

        Returns:
            The module's output with a tensor for each scalar and :class:`NotReturned` for other
            tensors.
        """
        count = self.num_microbatches
        microbatches = split_batch(
            args, kwargs, count, rows, asked_by="batch.gradient_accumulation"
        )
        self._are_counted = are_counted
        self._checked_loss |= knows_rows
        with self.buffers.call(forward) as forward:
            local = self._local_counts(forward, microbatches)
            self._seen.expect(local)
            totals = self.ranks.total(torch.stack(local)).unbind() if local else ()
            outputs = self._microbatches(forward, microbatches, rows, totals, check)
        self._seen.check()
        early = self.parameters.used_early
        put_back, used = self.parameters.take_reduced(), self._loss_scale.value

        def finish(scale: Tensor) -> None:
            put_back()
            self.parameters.finish_backward(self._loss_scale.correction(scale, used))

        params = self.parameters.params
        has_grad = [p for p in params if p.unsharded is not None and p.unsharded.grad is not None]
        refuse_stale = functools.partial(
            self.parameters.stale_graphs.as_now(), {*has_grad, *early}
        )
        marked = marked_scalars(outputs, self._mean, self.loss_of)
        graph = self.parameters.asked.of_call()
        return with_deferred_backward(marked, params, finish, self.device, refuse_stale, graph)

    def _microbatches(
        self,
        forward: Callable[..., Any],
        microbatches: Sequence[_MicroBatch],
        rows: Sequence[Rows | None] | None,
        totals: Sequence[Tensor],
        check: Callable[[Any], None],
    ) -> list[Any]:
        outputs: list[Any] = []
        state = GeneratorStates()
        for index, (args, kwargs) in enumerate(microbatches):
            state.put_back()
            known = functools.partial(self._known_count, totals)
            means = TokenMeans(self._num_parts, known, ratios_to_count(self._are_counted))
            num_rows = _num_rows(args, kwargs, rows)
            with self.rng.of_part(index, len(microbatches)):
                with self.rng.of_call(self.model, args, kwargs, num_rows), means:
                    output = forward(*args, **kwargs)
                means.check_complete()
                check(output)
                loss = self.loss_of(output)
                if not self._checked_loss:
                    self._checked_loss = True
                    means.warn_of_sums(loss)
                outputs.append(only_scalars(output, "in parts"))
                del output
                loss = loss / len(microbatches)
                torch.autograd.backward(loss, torch.full_like(loss, self._loss_scale.value))
            self.parameters.end_microbatch()
        return outputs

    def _local_counts(
        self, forward: Callable[..., Any], microbatches: Sequence[_MicroBatch]
    ) -> list[Tensor]:
        """Return what each token mean of the module counts on this rank."""
        # Programs change what modules hold, as the loss that is computed later in training.
        form = Form(plain_attributes(self.model), self._are_counted)
        if self._counts_by_running is None:
            self._counts_by_running = self._cannot_count(forward, microbatches, form)
            if self._counts_by_running:
                self._counts = TargetCounts(self._run_counting)  # of the model itself
        if self._counts_by_running:
            found = self._counted_by_running(forward, microbatches, form)
        else:
            found = [self._counts.of(forward, each, form) for each in microbatches]
        for counts in found:
            check_known(counts, "batch.gradient_accumulation")
        return summed_counts(found, otherwise="batch.gradient_accumulation 1")

    def _cannot_count(
        self, forward: Callable[..., Any], microbatches: Sequence[_MicroBatch], form: Form
    ) -> bool:
        """Whether the model does not run on placeholders, on any rank that shares the batch."""
        found: list[list[Tensor]] = []
        # Whatever user code raises means that it does not run on placeholders.
        with contextlib.suppress(Exception):
            found = [self._counts.of(forward, each, form) for each in microbatches]
            summed_counts(found, otherwise="")
        are_known = all(is_known(count) for counts in found for count in counts)
        failed = len({len(counts) for counts in found}) != 1 or not are_known
        told = torch.tensor([failed], dtype=torch.float64, device=self.device)
        return bool(self.ranks.total(told) > 0)

    def _counted_by_running(
        self, forward: Callable[..., Any], microbatches: Sequence[_MicroBatch], form: Form
    ) -> list[list[Tensor]]:
        """Return the counts of all micro-batches; forward runs on all ranks, or on none."""
        # Ranks may gather parameters in forward: they tell each other.
        known = [self._counts.replayed(each, form) for each in microbatches]
        found = [counts for counts in known if counts is not None]
        has_to_run = torch.tensor([float(len(found) < len(known))], device=self.device)
        if not bool(self.ranks.total(has_to_run) > 0):
            return found
        found = [self._counts.seen(forward, each, form) for each in microbatches]
        if not self._said_running and self._counts.has_to_run(microbatches[0], form):
            self._said_running = True
            warn_at_user_line(
                "the targets of the batch could not be counted without running the model, so "
                "batch.gradient_accumulation runs its forward once more for every micro-batch; "
                "modules that hold parameters and make targets, or look at their values, are the "
                "reason"
            )
        return found

    def _run_counting(
        self, forward: Callable[..., Any], microbatch: _MicroBatch, mode: TokenCounts
    ) -> None:
        run = None if self._counts_by_running else StageRun.counting(0)
        with contextlib.nullcontext() if run is None else run.running():
            run_counting(forward, microbatch, self.staging, run, self.device, mode)

    def _known_count(self, totals: Sequence[Tensor], index: int, counted: Tensor) -> Tensor:
        if index >= len(totals):
            raise ValueError(
                "forward computed more token-mean losses than when its targets were counted; "
                "compute them unconditionally, or use batch.gradient_accumulation 1"
            )
        self._seen.add(index, counted)
        return totals[index]

    @property
    def _num_parts(self) -> int:
        return self.ranks.size * self.num_microbatches

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        return mean_of_parts(losses, self.ranks.total, self._num_parts)


def _num_rows(
    args: Sequence[Any], kwargs: Mapping[str, Any], rows: Sequence[Rows | None] | None
) -> int:
    return RowCoupling(given=None if rows is None else tuple(rows)).num_rows(args, kwargs)
