"""One step of a pipeline: from the batch to a loss whose backward hands out gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._cross_replica.borders import Rows
from vescale_parallel._loss.output import Scalar
from vescale_parallel._parameters.sharded_parameter import ShardedParameter
from vescale_parallel._rng.own_streams import OwnStreams
from vescale_parallel._torch_private import pytree

from .deferred_backward import with_deferred_backward
from .runner import Pipeline
from .stage_buffers import StageBuffers
from .tied_weights import return_tied_gradients, send_tied_weights


class PipelineStep:
    """Runs the steps of one rank of a pipeline.

    Args:
        pipeline: Runs the schedule.
        params: Every parameter.
        buffers: Those that forward changes; None for a model without any.
        finish: Reduces gradients, multiplied by what it is given.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        params: Sequence[ShardedParameter],
        buffers: StageBuffers | None,
        finish: Callable[[Tensor], None],
    ) -> None:
        self._pipeline, self._params = pipeline, params
        self._buffers, self._finish = buffers, finish
        self._streams = OwnStreams(pipeline.mesh)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Sequence[Rows | None] | None = None,
    ) -> Any:
        """Run one step on this rank's batch. Every rank must call this.

        Args:
            forward: The model's own call.
            args: Positional arguments: this rank's batch.
            kwargs: Keyword arguments, likewise.
            rows: Where the rows are in every leaf of these; None if that is not known.

        Returns:
            The module's output with a tensor for each scalar and None for other tensors.
        """
        pipeline, train = self._pipeline, torch.is_grad_enabled()
        send_tied_weights(self._params, pipeline.group_of("F"))
        runs = contextlib.nullcontext(forward)
        if self._buffers is not None:
            runs = self._buffers.call(forward)
        with self._streams.of_call(), runs as forward:
            output = pipeline.run(forward, args, kwargs, rows, train=train)
        device = pipeline.mesh.device_type
        if not train:
            return pytree.tree_map_only(Scalar, lambda x: x.tensor(device), output)
        return_tied_gradients(self._params, pipeline.group_of("B"))
        return with_deferred_backward(output, self._params, self._finish, device)
