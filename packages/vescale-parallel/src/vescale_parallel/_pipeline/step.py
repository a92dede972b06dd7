"""One step of a pipeline: from the batch to a loss whose backward hands out gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.borders import RowCoupling
from vescale_parallel._loss.output import Scalar, is_loss
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._parameters.asked_gradients import AskedGradients
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._parameters.stale_graphs import StaleGraphs
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.calls.call_signature import CallForms

from .buffers import StageBuffers
from .cuts.configurations import settings_of, write_settings
from .outputs.deferred_backward import with_deferred_backward, with_graph
from .outputs.joined import returned_rows
from .runner import Pipeline, RunBackward
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

    def enter_backward(self) -> None:
        """Show plain parameters, gathered, for backward through graphs."""
        ...

    def leave_backward(self, on_stages: Iterable[ShardedParameter] = ()) -> None:
        """Reduce gradients; ``on_stages`` are those of which some stage has one."""
        ...


class PipelineStep:
    """Runs the steps of one rank of a pipeline.

    ``buffers`` are those that forward changes, and attributes; ``finish`` reduces
    gradients, multiplied by what it is given, None being 1, and is told of which parameters some
    stage has one; ``reduced`` are gradients that were reduced before.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        params: Sequence[ShardedParameter],
        buffers: StageBuffers,
        finish: Callable[[Tensor | None, set[ShardedParameter]], None],
        reduced: EarlyReductions,
    ) -> None:
        self._model, self._forms = model, CallForms(model)
        self._pipeline, self._params = pipeline, params
        self._buffers, self._finish, self._reduced = buffers, finish, reduced
        pipeline.reduce = reduced.reduce_stage
        pipeline.stays = self._plain_tensors
        pipeline.outputs.own_flags = self._has_gradients
        pipeline.calls.scalars = partial(_scalars_on, model)
        pipeline.calls.settings = partial(settings_of, model)
        pipeline.calls.write_settings = partial(write_settings, model)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        coupling: RowCoupling | None = None,
        *,
        knows_rows: bool = False,
    ) -> Any:
        """Run one step on this rank's batch. Every rank must call this.

        ``forward`` is the model's own call; ``coupling`` is what is known of the rows of it, and
        ``knows_rows`` whether it was checked that losses are means over them.

        Returns:
            The module's output with a tensor for each scalar. Other tensors are as the plan's
            ``outputs`` says if it returns its loss, None being :class:`NotReturned`; else they are
            whole, see [Note: what prediction costs] and [Note: losses of the program].
        """
        pipeline = self._pipeline
        coupling = RowCoupling() if coupling is None else coupling
        rows = coupling.rows_of(args, kwargs, to_cut=True)
        placement = pipeline.plan.pipeline_parallel.placement
        send_tied_weights(self._params, pipeline.group_of("F"), placement)
        form = (self._forms.form(args, kwargs), self._model.training, coupling.ratios)
        pipeline.calls.are_counted, pipeline.calls.knows_rows = coupling.ratios, knows_rows
        pipeline.trained = tuple(param.sharded.requires_grad for param in self._params)
        with self._buffers.call(forward, form) as forward:
            call = forward, args, kwargs, rows, returned_rows(coupling, args, kwargs)
            seen = pipeline.seen(*call[:4], form=form)
            if seen.kept:
                _refuse_kept(seen.kept)
            if not torch.is_grad_enabled():
                return self._plain(pipeline.predict(*call, form=form))
            if not seen.has_loss:
                output, run_backward = pipeline.run_apart(*call, form=form)
                run = partial(self._run_backward, run_backward)
                return with_graph(self._plain(output), run, self._reduced.asked.of_call())
            output = pipeline.run(*call, form=form)
        return_tied_gradients(self._params, pipeline.group_of("B"), placement)
        put_back = self._reduced.take_reduced()
        assert pipeline.outputs.flags is not None
        used, with_grad = pipeline.loss_scale.value, self._with_gradient(pipeline.outputs.flags)

        def finish(scale: Tensor) -> None:
            put_back()
            self._finish(pipeline.loss_scale.correction(scale, used), with_grad)

        check, device = partial(self._reduced.stale_graphs.as_now(), with_grad), self._device
        graph = self._reduced.asked.of_call()
        return with_deferred_backward(output, self._params, finish, device, check, graph)

    def _run_backward(self, passes: RunBackward, grads: Sequence[Tensor | None]) -> None:
        """Run the backward passes of a call that returned no loss, and reduce gradients."""
        pipeline = self._pipeline
        self._reduced.enter_backward()
        flags = passes(grads)
        placement = pipeline.plan.pipeline_parallel.placement
        return_tied_gradients(self._params, pipeline.group_of("B"), placement)
        self._reduced.leave_backward(self._with_gradient(flags))

    def _plain(self, output: Any) -> Any:
        return pytree.tree_map_only(Scalar, lambda x: x.tensor(self._device), output)

    @property
    def _device(self) -> str:
        return self._pipeline.mesh.device_type

    def _with_gradient(self, flags: Tensor) -> set[ShardedParameter]:
        """Return the parameters that have a gradient on a rank of the pipeline."""
        anywhere = zip(self._params, flags.amax(0).tolist(), strict=True)
        return {param for param, has in anywhere if has}

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


def _refuse_kept(name: str) -> None:
    """Refuse a scalar that forward keeps and does not return; warn of it in evaluation."""
    text = (
        f"forward returns no loss, but keeps a scalar as {name}: other stages of a pipeline do "
        "not come to that line, and the last one does for every micro-batch. Have forward return "
        "what the loop reads"
    )
    if torch.is_grad_enabled():
        raise ValueError(text)
    warn_at_user_line(text)


def _scalars_on(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors among a model's attributes that may be losses, by their names."""
    return {
        f"{type(module).__name__}.{name}": held
        for module in model.modules()
        for name, held in vars(module).items()
        if is_loss(held)
    }
