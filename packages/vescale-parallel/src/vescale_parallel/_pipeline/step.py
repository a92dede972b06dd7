"""One step of a pipeline: from the batch to a loss whose backward hands out gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.borders import RowCoupling, Rows
from vescale_parallel._loss.output import Scalar
from vescale_parallel._parameters.asked_gradients import AskedGradients
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._parameters.stale_graphs import StaleGraphs
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.call_signature import CallForms

from .buffers import StageBuffers
from .deferred_backward import refusing_backward, with_deferred_backward
from .predict import returned_rows
from .runner import Pipeline
from .tied_weights import return_tied_gradients, send_tied_weights


class EarlyReductions(Protocol):
    """Gradients of a step before its loss is differentiated."""

    stale_graphs: StaleGraphs
    asked: AskedGradients

    @property
    def used_early(self) -> set[ShardedParameter]:
        """Those with a gradient on this rank, of what was reduced."""
        ...

    def reduce_stage(self, stage: int, microbatch: int | None) -> None:
        """Begin to reduce what a stage of a pipeline has, of a micro-batch or (None) of all."""
        ...

    def take_reduced(self) -> Callable[[], None]:
        """Take away gradients that were reduced already; return what puts them back."""
        ...


class PipelineStep:
    """Runs the steps of one rank of a pipeline.

    ``buffers`` are those that forward changes, None for a model without any; ``finish`` reduces
    gradients, multiplied by what it is given, None being 1, and is told of which parameters some
    stage has one; ``reduced`` are gradients that were reduced before.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        params: Sequence[ShardedParameter],
        buffers: StageBuffers | None,
        finish: Callable[[Tensor | None, set[ShardedParameter]], None],
        reduced: EarlyReductions,
    ) -> None:
        self._model, self._forms = model, CallForms(model)
        self._with_loss: dict[object, bool] = {}
        self._pipeline, self._params = pipeline, params
        self._buffers, self._finish, self._reduced = buffers, finish, reduced
        pipeline.reduce = reduced.reduce_stage
        pipeline.stays = self._plain_tensors
        pipeline.outputs.own_flags = self._has_gradients

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        coupling: RowCoupling | None = None,
    ) -> Any:
        """Run one step on this rank's batch. Every rank must call this.

        ``forward`` is the model's own call; ``coupling`` is what is known of the rows of it.

        Returns:
            The module's output with a tensor for each scalar. Other tensors are as the plan's
            ``outputs`` says in a step that is differentiated, None being :class:`NotReturned`;
            else they are whole, see [Note: what prediction costs].
        """
        pipeline = self._pipeline
        coupling = RowCoupling() if coupling is None else coupling
        rows = coupling.rows_of(args, kwargs)
        placement = pipeline.plan.pipeline_parallel.placement
        send_tied_weights(self._params, pipeline.group_of("F"), placement)
        form = (self._forms.form(args, kwargs), self._model.training)
        runs = contextlib.nullcontext(forward)
        if self._buffers is not None:
            runs = self._buffers.call(forward, form)
        pipeline.trained = tuple(param.sharded.requires_grad for param in self._params)
        with runs as forward:
            returned = returned_rows(coupling, args, kwargs)
            train = torch.is_grad_enabled() and self._trains(form, forward, args, kwargs, rows)
            if train:
                output = pipeline.run(forward, args, kwargs, rows, returned, form=form)
            else:
                with torch.no_grad():
                    output = pipeline.predict(forward, args, kwargs, rows, returned, form=form)
        device = pipeline.mesh.device_type
        if train:
            return_tied_gradients(self._params, pipeline.group_of("B"), placement)
            put_back = self._reduced.take_reduced()
            used, flags = pipeline.loss_scale.value, pipeline.outputs.flags
            assert flags is not None

            anywhere = zip(self._params, flags.amax(0).tolist(), strict=True)
            with_grad = {param for param, has in anywhere if has}

            def finish(scale: Tensor) -> None:
                put_back()
                self._finish(pipeline.loss_scale.correction(scale, used), with_grad)

            check = partial(self._reduced.stale_graphs.as_now(), with_grad)
            graph = self._reduced.asked.of_call()
            return with_deferred_backward(output, self._params, finish, device, check, graph)
        output = pytree.tree_map_only(Scalar, lambda x: x.tensor(device), output)
        if not torch.is_grad_enabled():
            return output
        return refusing_backward(output, self._reduced.asked.of_call())

    def _plain_tensors(self) -> Iterator[Tensor]:
        yield from (param.unsharded for param in self._params if param.unsharded is not None)
        yield from self._model.buffers()

    def _has_gradients(self) -> Tensor:
        early = self._reduced.used_early
        plain = [(param.unsharded, param in early) for param in self._params]
        return torch.tensor(
            [was or (each is not None and each.grad is not None) for each, was in plain],
            dtype=torch.uint8,
        )

    def _trains(
        self,
        form: object,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Sequence[Rows | None] | None,
    ) -> bool:
        """Whether this form of call returns a loss; all stages ask the last one, once."""
        if form not in self._with_loss:
            self._with_loss[form] = self._pipeline.returns_loss(
                forward, args, kwargs, rows, form=form
            )
        return self._with_loss[form]
