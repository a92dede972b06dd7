"""Run a schedule: stages, what they send each other, and the loss that all of them report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import named_failures, profiler_range
from vescale_parallel._cross_replica.borders import Rows
from vescale_parallel._loss.output import DTYPES, is_loss, loss_of, marked_scalars, mean_of_parts
from vescale_parallel._loss.token_mean import TokenMeans
from vescale_parallel._mesh.mesh import axis_rank, second_group
from vescale_parallel._mesh.transfers import tell_sent
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import pytree

from .count_targets import run_counting, summed_counts
from .microbatches import num_rows_of, split_batch
from .placeholders import Placeholder
from .predict import Returned, common_num_microbatches, joined, num_microbatches_for, share
from .schedules import Action, actions_of, forward_actions
from .stage_module import StageDone, StageRun, Staging

_HEADER_SIZE = 10  # dtype, number of dims, up to eight sizes


@dataclass(eq=False)
class _Pass:
    """What a stage keeps of one micro-batch between forward and backward."""

    received: Tensor | None
    output: Any


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
    """

    plan: ParallelPlan
    mesh: DeviceMesh
    staging: Staging
    starts: Sequence[int]
    num_blocks: int
    total: Callable[[Tensor], Tensor]
    _groups: dict[str, dist.ProcessGroup] = field(default_factory=dict[str, dist.ProcessGroup])
    _sending: list[tuple[dist.Work, Tensor]] = field(
        default_factory=list[tuple[dist.Work, Tensor]]
    )

    _headers: dict[object, tuple[torch.Size, torch.dtype]] = field(
        default_factory=dict[object, tuple[torch.Size, torch.dtype]]
    )
    _checked_loss: bool = False
    _microbatches: int = 1

    def __post_init__(self) -> None:
        # Gradients travel on a group of their own: on one, two neighbours that send to each
        # other first would wait for each other. Neither is the mesh's own group, whose sends
        # and receives wait for torch's half hour whatever the default group's timeout is.
        self._groups["F"] = second_group(self.mesh, "pp")
        self._groups["B"] = second_group(self.mesh, "pp")

    def group_of(self, kind: Literal["F", "B"]) -> dist.ProcessGroup:
        """Return the ranks of this pipeline, to send activations or gradients over."""
        return self._groups[kind]

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None = None,
    ) -> Any:
        """Run one step's schedule. Every rank must call this.

        Gradients are left in the unsharded parameters, for an incoming gradient of 1. ``forward``
        is the model's own call, of this rank's batch; ``rows`` says where the rows are in every
        leaf of it, None if that is not known.

        Returns:
            The module's output with a :class:`Scalar` for each scalar of the whole batch and None
            for other tensors.
        """
        pipeline = self.plan.pipeline_parallel
        microbatches = split_batch(args, kwargs, self.plan.num_microbatches, rows)
        actions = actions_of(pipeline.schedule, **self._shape(len(microbatches)))
        passes: dict[tuple[int, int], _Pass] = {}
        outputs: list[Any] = []
        counts = self._count(forward, microbatches) if self._has_last_stage else []
        for action in actions:
            key = (action.stage, action.microbatch)
            if action.kind == "B":
                with profiler_range(*_words("backward", action)):
                    self._backward(action, passes.pop(key), len(microbatches))
                continue
            with profiler_range(*_words("forward", action)):
                done = self._forward(action, forward, microbatches[action.microbatch], counts)
            if action.stage == len(self.starts) - 1:
                outputs.append(done.output)
                done.output = loss_of(done.output)
            passes[key] = done
        self._finish_sends()
        return self._agree(marked_scalars(outputs, self._mean) if outputs else None)

    def predict(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None = None,
        returned: Returned | None = None,
    ) -> Any:
        """Run forward passes alone, as :meth:`run` otherwise, without gradients.

        What it returns has tensors, too; see [Note: what prediction costs]. ``returned`` is where
        the rows are in it; None runs the batch in one piece.
        """
        microbatches: list[tuple[Any, Any]] = [(args, kwargs)]
        num_rows = num_rows_of(args, kwargs, rows) or 0
        most = self.plan.num_microbatches
        num_microbatches = num_microbatches_for(num_rows, 1 if returned is None else most)
        data = self.plan.data_parallel
        if data.size > 1 and data.zero_stage == 3:
            # Ranks gather parameters together, once for each micro-batch of each.
            num_microbatches = common_num_microbatches(
                num_rows, num_microbatches, most, data.size, self.total, self.mesh.device_type
            )
        if num_microbatches > 1:
            microbatches = split_batch(args, kwargs, num_microbatches, rows)
        actions = forward_actions(**self._shape(len(microbatches)))
        outputs: list[Any] = []
        counts = self._count(forward, microbatches) if self._has_last_stage else []
        for action in actions:
            done = self._forward(action, forward, microbatches[action.microbatch], counts)
            if action.stage == len(self.starts) - 1:
                outputs.append(done.output)
        self._finish_sends()
        if not outputs:
            return self._agree(None)
        return self._agree(*joined(outputs, returned, num_rows // len(microbatches), self._mean))

    def returns_loss(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: Sequence[Rows | None] | None = None,
    ) -> bool:
        """Whether forward returns a scalar for a batch. Every rank must call this."""
        found = [False]
        if self._has_last_stage:
            num_rows = num_rows_of(args, kwargs, rows) or 0
            count = num_microbatches_for(num_rows, self.plan.num_microbatches)
            first = split_batch(args, kwargs, count, rows)[0] if count > 1 else (args, kwargs)
            output, _ = self._run_counting(forward, first)
            found = [any(map(is_loss, pytree.tree_leaves(output)))]
        return bool(self._agree(found[0]))

    def _shape(self, num_microbatches: int) -> dict[str, int]:
        """Note how many micro-batches run now; return what a schedule depends on."""
        self._microbatches = num_microbatches
        rank, pipeline = axis_rank(self.mesh, "pp"), self.plan.pipeline_parallel
        sizes = {"size": pipeline.size, "virtual_stages": pipeline.virtual_stages}
        return {"rank": rank, "microbatches": num_microbatches, **sizes}

    def _forward(
        self,
        action: Action,
        forward: Callable[..., Any],
        microbatch: tuple[Any, Any],
        counts: Sequence[Tensor],
    ) -> _Pass:
        received: list[Tensor] = []

        def receive(like: Tensor) -> Tensor:
            activation = self._receive_activation(action, signature, like.device)
            received.append(activation.requires_grad_(torch.is_grad_enabled()))
            # A new tensor, so that a block may write to its input in place.
            return activation.view_as(activation) if torch.is_grad_enabled() else activation

        stage = action.stage
        signature = _signature(microbatch)
        last = stage == len(self.starts) - 1
        end = self.num_blocks if last else self.starts[stage + 1]
        run = StageRun(stage, self.starts[stage], end, last, receive)
        self.staging.run = run
        # Put back afterwards: a model may call another one.
        was_usable = Placeholder.usable
        # The first stage needs none: what it does not own comes later.
        Placeholder.usable = stage > 0
        means = TokenMeans(self._num_parts, functools.partial(_known_count, counts))
        try:
            with means:
                output = forward(*microbatch[0], **microbatch[1])
        except StageDone as done:
            activation = done.activation
            self._send_activation(activation.detach(), action, signature)
            return _Pass(received[0] if received else None, activation)
        finally:
            self.staging.run = None
            Placeholder.usable = was_usable
        run.check_complete(self.num_blocks)
        if torch.is_grad_enabled() and not self._checked_loss:
            self._checked_loss = True
            means.warn_of_sums(loss_of(output))
        return _Pass(received[0] if received else None, output)

    def _count(
        self, forward: Callable[..., Any], microbatches: Sequence[tuple[Any, Any]]
    ) -> list[Tensor]:
        """Return what each token mean of the module counts over the global batch.

        Runs forward with placeholders for what every block and every other module with
        parameters returns, so that the targets of all micro-batches are known before the first
        backward pass.
        """
        found = [self._run_counting(forward, microbatch)[1] for microbatch in microbatches]
        return [self.total(n) for n in summed_counts(found, otherwise="pipeline_parallel.size 1")]

    def _run_counting(
        self, forward: Callable[..., Any], microbatch: tuple[Any, Any]
    ) -> tuple[Any, list[Tensor]]:
        run = StageRun.counting(self.num_blocks)
        return run_counting(forward, microbatch, self.staging, run, self.mesh.device_type)

    @property
    def _has_last_stage(self) -> bool:
        return axis_rank(self.mesh, "pp") == (len(self.starts) - 1) % self._size

    @property
    def _num_parts(self) -> int:
        """Equal shards and micro-batches that the global batch is in."""
        return self.plan.data_parallel.size * self._microbatches

    def _backward(self, action: Action, done: _Pass, num_microbatches: int) -> None:
        stage = action.stage
        if stage == len(self.starts) - 1:
            torch.autograd.backward(done.output / num_microbatches)
        else:
            grad = torch.empty(
                done.output.shape, dtype=done.output.dtype, device=done.output.device
            )
            self._receive(grad, stage + 1, action)
            # A stage whose parameters are all frozen has nothing to differentiate.
            if done.output.requires_grad:
                torch.autograd.backward(done.output, grad)
        if stage > 0:
            assert done.received is not None
            grad = done.received.grad
            self._send(
                torch.zeros_like(done.received) if grad is None else grad, stage - 1, action
            )

    def _send_activation(self, activation: Tensor, action: Action, signature: object) -> None:
        """Send an activation, the first time with its shape and dtype."""
        key = (action.stage, signature)
        if key not in self._headers:
            self._headers[key] = (activation.shape, activation.dtype)
            header = torch.zeros(_HEADER_SIZE, dtype=torch.int64)
            header[0], header[1] = DTYPES.index(activation.dtype), activation.ndim
            header[2 : 2 + activation.ndim] = torch.tensor(activation.shape)
            self._send(header.to(activation.device), action.stage + 1, action)
        self._send(activation, action.stage + 1, action)

    def _receive_activation(
        self, action: Action, signature: object, device: torch.device
    ) -> Tensor:
        key = (action.stage - 1, signature)
        if key not in self._headers:
            header = torch.zeros(_HEADER_SIZE, dtype=torch.int64, device=device)
            self._receive(header, action.stage - 1, action)
            dtype, ndim, *sizes = header.tolist()
            self._headers[key] = (torch.Size(sizes[:ndim]), DTYPES[dtype])
        shape, dtype = self._headers[key]
        activation = torch.empty(shape, dtype=dtype, device=device)
        self._receive(activation, action.stage - 1, action)
        return activation

    def _send(self, tensor: Tensor, stage: int, action: Action) -> None:
        tensor = tensor.contiguous()
        group = self._groups[action.kind]
        tell_sent("send activations" if action.kind == "F" else "send gradients", tensor)
        with profiler_range("send over pp to stage", stage), named_failures():
            work = dist.isend(
                tensor, group=group, group_dst=stage % self._size, tag=self._tag(action, stage)
            )
        assert work is not None
        # Kept alive until the schedule ends: the backend reads it later.
        self._sending.append((work, tensor))

    def _receive(self, into: Tensor, stage: int, action: Action) -> None:
        group = self._groups[action.kind]
        with profiler_range("receive over pp from stage", stage), named_failures():
            dist.recv(
                into,
                group=group,
                group_src=stage % self._size,
                tag=self._tag(action, action.stage),
            )

    def _tag(self, action: Action, receiving_stage: int) -> int:
        return action.microbatch * len(self.starts) + receiving_stage

    @property
    def _size(self) -> int:
        return self.plan.pipeline_parallel.size

    def _finish_sends(self) -> None:
        with named_failures():
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def _agree(self, told: Any, tensors: Sequence[Tensor] = ()) -> Any:
        """Give all stages what the last one has: a structure, with :class:`Sent` for tensors."""
        last = (len(self.starts) - 1) % self._size
        return share(told, tensors, mesh=self.mesh, group=self._groups["F"], source=last)

    def _mean(self, scalars: Sequence[Tensor]) -> float:
        """Return the mean of a scalar over the micro-batches of all data-parallel ranks."""
        return mean_of_parts(scalars, self.total, self._num_parts)


def _words(direction: str, action: Action) -> tuple[object, ...]:
    """Return what profiles call a pass."""
    return direction, "of stage", action.stage, "micro-batch", action.microbatch


def _known_count(counts: Sequence[Tensor], index: int, counted: Tensor) -> Tensor:
    if index >= len(counts):
        raise ValueError(
            "the module computed a loss before it called all of its blocks, or more losses than "
            "when its targets were counted; under pipeline parallelism the loss comes last"
        )
    return counts[index]


def _signature(microbatch: tuple[Any, Any]) -> object:
    """Return what the shape and dtype of activations can depend on, the same on all stages."""
    tensors = [leaf for leaf in pytree.tree_leaves(microbatch) if isinstance(leaf, Tensor)]
    autocast = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    ]
    shapes = tuple((t.shape, t.dtype) for t in tensors)
    return (shapes, *autocast, torch.get_default_dtype(), torch.is_grad_enabled())
