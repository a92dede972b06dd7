"""Gradient accumulation inside of one call: a rank's rows in micro-batches, one after the other.

[Note: accumulation] It is a pipeline of one stage: each micro-batch runs forward and backward
before the next begins, so a rank has the activations of one. Where a loss is a mean over counted
targets, the count of the whole batch is found first, with placeholders for what modules with
parameters return, as pipelines do; a model that cannot run so is run without gradients instead.
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
from vescale_parallel._loss.token_mean import TokenMeans
from vescale_parallel._mesh.data_ranks import DataRanks
from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._pipeline.deferred_backward import with_deferred_backward
from vescale_parallel._pipeline.microbatches import split_batch
from vescale_parallel._pipeline.stage_buffers import StageBuffers
from vescale_parallel._pipeline.stage_module import StageRun, Staging, stage_module
from vescale_parallel._pipeline.targets import run_counting, summed_counts
from vescale_parallel._rng.sharded_rng import ShardedRng

_MicroBatch = tuple[tuple[Any, ...], dict[str, Any]]


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
            index=None,
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
        buffers: Those that forward changes; None for a model without any.
    """

    num_microbatches: int
    model: nn.Module
    device: str
    parameters: ZeroState
    ranks: DataRanks
    rng: ShardedRng
    staging: Staging
    buffers: StageBuffers | None
    _counts_by_running: bool | None = None
    _checked_loss: bool = False
    _seen: list[Tensor] = field(default_factory=list[Tensor])
    _loss_scale: LossScale = field(default_factory=LossScale)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Sequence[Rows | None] | None,
        check: Callable[[Any], None],
    ) -> Any:
        """Run forward and backward on this rank's batch. Every rank must call this.

        Args:
            forward: The model's own call.
            args: Positional arguments: this rank's batch.
            kwargs: Keyword arguments, likewise.
            rows: Where the rows are in every leaf of these; None if that is not known.
            check: Raises for an output of a micro-batch that is no result of this rank.

        Returns:
            The module's output with a tensor for each scalar and None for other tensors.
        """
        count = self.num_microbatches
        microbatches = split_batch(
            args, kwargs, count, rows, asked_by="batch.gradient_accumulation"
        )
        runs = contextlib.nullcontext(forward)
        if self.buffers is not None:
            runs = self.buffers.call(forward)
        with runs as forward:
            local = self._local_counts(forward, microbatches)
            totals = self.ranks.total(torch.stack(local)).unbind() if local else ()
            outputs = self._microbatches(forward, microbatches, rows, totals, check)
        self._check_counts(local)
        put_back, used = self.parameters.take_reduced(), self._loss_scale.value

        def finish(scale: Tensor) -> None:
            put_back()
            self.parameters.finish_backward(self._loss_scale.correction(scale, used))

        marked = marked_scalars(outputs, self._mean)
        return with_deferred_backward(marked, self.parameters.params, finish, self.device)

    def _microbatches(
        self,
        forward: Callable[..., Any],
        microbatches: Sequence[_MicroBatch],
        rows: Sequence[Rows | None] | None,
        totals: Sequence[Tensor],
        check: Callable[[Any], None],
    ) -> list[Any]:
        outputs: list[Any] = []
        self._seen = []
        state = _GeneratorStates()
        for index, (args, kwargs) in enumerate(microbatches):
            state.put_back()
            means = TokenMeans(self._num_parts, functools.partial(self._known_count, totals))
            num_rows = _num_rows(args, kwargs, rows)
            with self.rng.of_part(index, len(microbatches)):
                with self.rng.of_call(self.model, args, kwargs, num_rows), means:
                    output = forward(*args, **kwargs)
                check(output)
                loss = loss_of(output)
                if not self._checked_loss:
                    self._checked_loss = True
                    means.warn_of_sums(loss)
                outputs.append(only_scalars(output, detach=index + 1 < len(microbatches)))
                del output
                loss = loss / len(microbatches)
                torch.autograd.backward(loss, torch.full_like(loss, self._loss_scale.value))
            self.parameters.end_microbatch()
        return outputs

    def _local_counts(
        self, forward: Callable[..., Any], microbatches: Sequence[_MicroBatch]
    ) -> list[Tensor]:
        """Return what each token mean of the module counts on this rank."""
        if self._counts_by_running is None:
            found: list[Tensor] | None = None
            # Whatever user code raises means that it does not run on placeholders.
            with contextlib.suppress(Exception):
                found = self._counted(forward, microbatches, StageRun.counting(0))
            failed = torch.tensor([float(found is None)], device=self.device)
            self._counts_by_running = bool(self.ranks.total(failed) > 0)
            if not self._counts_by_running:
                assert found is not None
                return found
            warn_at_user_line(
                "the targets of the batch could not be counted without running the model, so "
                "batch.gradient_accumulation runs its forward once more for every micro-batch; "
                "modules that hold parameters and compute the loss from targets are the reason"
            )
        run = None if self._counts_by_running else StageRun.counting(0)
        return self._counted(forward, microbatches, run)

    def _counted(
        self,
        forward: Callable[..., Any],
        microbatches: Sequence[_MicroBatch],
        run: StageRun | None,
    ) -> list[Tensor]:
        staging, device = self.staging, self.device
        found = [run_counting(forward, each, staging, run, device)[1] for each in microbatches]
        sums = summed_counts(found, otherwise="batch.gradient_accumulation 1")
        if any(each.device.type == "meta" for each in sums):
            raise ValueError("targets are counted inside of a module with parameters")
        return sums

    def _known_count(self, totals: Sequence[Tensor], index: int, counted: Tensor) -> Tensor:
        if index < len(self._seen):
            self._seen[index] = self._seen[index] + counted
        else:
            self._seen.append(counted)
        if index >= len(totals):
            raise ValueError(
                "forward computed more token-mean losses than when its targets were counted; "
                "compute them unconditionally, or use batch.gradient_accumulation 1"
            )
        return totals[index]

    def _check_counts(self, local: Sequence[Tensor]) -> None:
        if len(local) != len(self._seen) or (
            local and not torch.equal(torch.stack([*local]), torch.stack(self._seen))
        ):
            raise ValueError(
                "forward counted other targets of its loss than when it was run to see them: "
                f"expected {[float(x) for x in local]}, got {[float(x) for x in self._seen]}. "
                "Targets must not depend on what modules with parameters return; use "
                "batch.gradient_accumulation 1, and accumulate in the loop"
            )

    @property
    def _num_parts(self) -> int:
        return self.ranks.size * self.num_microbatches

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        return mean_of_parts(losses, self.ranks.total, self._num_parts)


class _GeneratorStates:
    """The states of the generators that forward draws from, before the first micro-batch."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def _num_rows(
    args: Sequence[Any], kwargs: Mapping[str, Any], rows: Sequence[Rows | None] | None
) -> int:
    return RowCoupling(given=None if rows is None else tuple(rows)).num_rows(args, kwargs)
