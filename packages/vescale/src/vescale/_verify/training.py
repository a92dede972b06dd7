"""The training program that is verified, on one device and as a rank."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import vescale_deferred
from vescale._parallelize import parallelize
from vescale._torch_private import pytree
from vescale_parallel import (
    ParallelPlan,
    compile_report,
    give_no_layers,
    packed_dims,
    with_constraints,
)

from .host_generators import host_state, kept_host_state, seed_host
from .record import Record, full, full_state, recorded_activations
from .reference_means import GlobalMeans, mean_in_order

LossOf = Callable[[nn.Module, Any], Tensor]
Change = Callable[[nn.Module], object] | None


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to train; the same on one device and on every rank.

    Attributes:
        model_fn: Makes the model.
        batches: The global batch of each step.
        optimizer_fn: Makes the optimizer.
        loss_of: What the loop does from a batch to the loss.
        max_grad_norm: To what norm gradients are clipped; None for not at all.
        dtype: Of parameters, buffers and batches with decimals; None as they are.
        seed: Of all random generators, before the construction and before the first step.
    """

    model_fn: Callable[[], nn.Module]
    batches: Sequence[Any]
    optimizer_fn: Callable[[nn.Module], Optimizer]
    loss_of: LossOf
    max_grad_norm: float | None
    dtype: torch.dtype | None
    seed: int

    def build(self) -> nn.Module:
        """Construct the model, real or deferred, as every run does."""
        torch.manual_seed(self.seed)
        seed_host(self.seed)
        model = self.model_fn()
        return model if self.dtype is None else model.to(self.dtype)

    @property
    def device(self) -> torch.device:
        """Where ranks put their models, and one device, too."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def cast(self, batch: Any) -> Any:
        """Give the decimals of a batch the dtype of the model."""
        return pytree.tree_map(self._cast, batch)

    def on_device(self, batch: Any) -> Any:
        """Give a batch the dtype and the device of the model."""
        return pytree.tree_map(
            lambda x: x.to(self.device) if isinstance(x, Tensor) else x, self.cast(batch)
        )

    def _cast(self, leaf: Any) -> Any:
        if self.dtype is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.to(self.dtype)


def on_one_device(program: Program, change: Change = None) -> Record:
    """Train on one device with whole batches.

    Args:
        program: What to train.
        change: What to do to the model first.
    """
    model, record = _plain_model(program), Record()
    if change is not None:
        change(model)
    record.initial = full_state(_state(model))
    optimizer = program.optimizer_fn(model)
    _seed(program, record)
    with recorded_activations(model, record):
        for batch in program.batches:
            loss = program.loss_of(model, program.on_device(batch))
            loss.backward()
            _end_of_step(program, model, optimizer, loss, record)
    return record


def shard_after_shard(
    program: Program, plan: ParallelPlan, change: Change = None, model: nn.Module | None = None
) -> Record:
    """Train on one device that runs every rank's micro-batches on their own.

    Gradients of a rank are accumulated in the order of its micro-batches, those of ranks summed
    in the order of ranks: over the shards of a copy first, over copies then. Where a plan reduces
    every micro-batch, its means over ranks are accumulated.

    Args:
        program: What to train.
        plan: Whose ranks and micro-batches.
        change: What to do to the model first.
        model: What to train instead of the program's plain model; its blocks are compiled if
            those of the plan are.
    """
    compiled = () if model is None else _compiled_blocks(model, plan)
    model, record = _plain_model(program) if model is None else model, Record()
    if change is not None:
        change(model)
    if plan.pipeline_parallel.size > 1:
        give_no_layers(model)  # keys that went through a cache lie otherwise in memory
    record.initial = full_state(_state(model))
    optimizer = program.optimizer_fn(model)
    copies = num_data_ranks(plan)
    if plan.data_parallel.zero_stage:
        copies //= plan.axes["dp_shard"]
    _seed(program, record)
    for whole_batch in program.batches:
        batch = program.on_device(whole_batch)
        means = _counted_means(program, plan, model, batch)
        # A pipeline looks at its first call, whose blocks run as they are written.
        is_looked_at = plan.pipeline_parallel.size > 1 and not record.losses
        blocks = [model.get_submodule(name) for name in compiled if not is_looked_at]
        with recorded_activations(model, record, compiled), means.left_in(blocks):
            loss, reduced = _gradients_of_ranks(program, plan, model, batch, means)
        model.zero_grad()
        for of_ranks in reduced:
            for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
                mean = mean_in_order(grads, copies)
                if mean is not None:
                    parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        _end_of_step(program, model, optimizer, loss, record)
    return record


def _gradients_of_ranks(
    program: Program, plan: ParallelPlan, model: nn.Module, batch: Any, means: GlobalMeans
) -> tuple[Tensor, list[list[list[Tensor | None]]]]:
    """Return the loss, and for every reduction every rank's gradients."""
    ranks, parts = num_data_ranks(plan), num_parts(plan)
    num_reductions = parts if plan.pipeline_parallel.reduce_every == "microbatch" else 1
    losses = list[Tensor]()
    found: list[list[list[Tensor | None]]] = [[] for _ in range(num_reductions)]
    for rank in range(ranks):
        for reduction in range(num_reductions):
            model.zero_grad()
            for part in range(reduction, parts, num_reductions):
                with means.of_forward():
                    own = shard_of(batch, rank * parts + part, ranks * parts)
                    loss = program.loss_of(model, own)
                (loss / parts).backward()
                losses.append(loss.detach())
            grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            found[reduction].append(grads)
    return torch.stack(losses).double().mean().to(losses[0].dtype), found


def _counted_means(
    program: Program, plan: ParallelPlan, model: nn.Module, batch: Any
) -> GlobalMeans:
    means = GlobalMeans(num_data_ranks(plan) * num_parts(plan))
    buffers = [buffer.clone() for buffer in model.buffers()]
    with means.of_forward(), torch.no_grad(), torch.random.fork_rng(), kept_host_state():
        program.loss_of(model, batch)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    means.is_counting = False
    return means


def in_chunks(program: Program, plan: ParallelPlan) -> Record:
    """Train as one rank that adds up in the chunks of a plan, shard after shard.

    Call it as the one rank of a world.
    """
    alone = ParallelPlan(
        tensor_parallel=replace(plan.tensor_parallel, size=1),
        numerics=plan.numerics,
        numerics_chunks=plan.numerics_chunks,
    )
    alone, rows = _fed(program, alone)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says what comes out otherwise
        model, _ = parallelize(alone, program.build(), dataset=rows)
    return shard_after_shard(program, plan, model=model)


def in_compiled_blocks(program: Program, plan: ParallelPlan) -> Record:
    """Train as one rank whose blocks a plan compiles, shard after shard.

    A compiler adds up in the order of its graphs, where blocks share what they read, too. Call
    it as the one rank of a world.
    """
    alone = ParallelPlan(compile=plan.compile, compile_backend=plan.compile_backend)
    alone, rows = _fed(program, alone)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says what comes out otherwise
        model, _ = parallelize(alone, program.build(), dataset=rows)
        return shard_after_shard(program, plan, model=model)


def _compiled_blocks(model: nn.Module, plan: ParallelPlan) -> tuple[str, ...]:
    """Return names of the blocks that a plan compiles on this rank."""
    return () if plan.compile == "none" else tuple(compile_report(model))


def on_a_rank(program: Program, plan: ParallelPlan) -> Record:
    """Train under a plan, as one of its ranks."""
    record = Record()
    plan, rows = _fed(program, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says what comes out otherwise
        model, optimizer, loader = parallelize(
            plan, program.build(), program.optimizer_fn, None, rows
        )
        record.initial, record.packed_dims = full_state(_state(model)), packed_dims(model)
        batches = [*loader]
        _seed(program, record)
        with recorded_activations(model, record, _compiled_blocks(model, plan)):
            for batch in batches:
                loss = program.loss_of(model, program.on_device(batch))
                loss.backward()
                _end_of_step(program, model, optimizer, loss, record)
    return record


def _fed(program: Program, plan: ParallelPlan) -> tuple[ParallelPlan, DataLoader[Any]]:
    """Return a plan for batches as long as the program's, and what loads their rows."""
    rows = num_rows(program.batches[0])
    examples = [_row(program.cast(b), i) for b in program.batches for i in range(rows)]
    loader = DataLoader[Any](_Rows(examples), batch_size=rows, collate_fn=_batch_of)
    return with_constraints(plan, {"batch.global_size": rows}), loader


def _plain_model(program: Program) -> nn.Module:
    model = program.build()
    if vescale_deferred.is_deferred(model):
        vescale_deferred.materialize(model)
    return model.to(program.device)


def _end_of_step(
    program: Program, model: nn.Module, optimizer: Any, loss: Tensor, record: Record
) -> None:
    record.gradients.append(
        {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    )
    if program.max_grad_norm is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), program.max_grad_norm)
        record.norms.append(full(norm))
    optimizer.step()
    optimizer.zero_grad()
    record.parameters.append(full_state(model.named_parameters()))
    record.buffers.append(full_state(model.named_buffers()))
    record.generators.append(torch.get_rng_state())
    record.on_host.append(host_state())
    record.losses.append(full(loss))


def _seed(program: Program, record: Record) -> None:
    torch.manual_seed(program.seed)
    seed_host(program.seed)
    record.generators.append(torch.get_rng_state())
    record.on_host.append(host_state())


def _state(model: nn.Module) -> Any:
    yield from model.named_parameters()
    yield from model.named_buffers()


# Batches.


def default_loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Call the model on a batch and return its loss.

    A mapping becomes keyword arguments if the model's forward has arguments of these names.

    Raises:
        TypeError: If what comes out is no loss.
    """
    output: Any = call(model, batch)
    if isinstance(output, Mapping):
        output = output.get("loss", output)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.dim():
        raise TypeError(
            "expected the model to return its loss, a tensor of no dims or something with .loss, "
            f"got {type(output).__name__}; give loss_of=lambda model, batch: ..."
        )
    return loss


def call(model: nn.Module, batch: Any) -> Any:
    """Give a model a batch as its forward takes it."""
    if isinstance(batch, Mapping):
        return model(**batch) if _takes(model, batch) else model(batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _takes(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in parameters}
    return any(p.kind is p.VAR_KEYWORD for p in parameters) or names >= {*batch}


def num_rows(batch: Any) -> int:
    """Return the size of the first dim of all tensors of a batch.

    Raises:
        ValueError: If they have none, or not the same.
    """
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    sizes = {x.shape[0] if x.dim() else 0 for x in tensors}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "expected batches whose tensors have their rows along the first dim, as many in each, "
            f"got shapes {[tuple(x.shape) for x in tensors]}"
        )
    return sizes.pop()


def rows_and_tokens(batches: Sequence[Any]) -> frozenset[int]:
    """Return the sizes of the first dim of tensors of batches, and of the first two."""
    shapes = [x.shape for x in pytree.tree_leaves([*batches]) if isinstance(x, Tensor)]
    rows = {shape[0] for shape in shapes if shape}
    return frozenset(rows | {shape[:2].numel() for shape in shapes if len(shape) > 1})


def num_data_ranks(plan: ParallelPlan) -> int:
    """Return how many ranks have rows of their own."""
    return plan.data_parallel.size


def num_parts(plan: ParallelPlan) -> int:
    """Return into how many micro-batches a rank divides its rows."""
    return plan.pipeline_parallel.microbatches * plan.batch.gradient_accumulation


def shard_of(batch: Any, index: int, num_shards: int) -> Any:
    """Return one of the equal parts of a batch."""

    def cut(leaf: Any) -> Any:
        return leaf.chunk(num_shards)[index] if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(cut, batch)


def _row(batch: Any, index: int) -> Any:
    return pytree.tree_map(lambda x: x[index] if isinstance(x, Tensor) else x, batch)


class _Rows(Dataset[Any]):
    """Rows, as PyTorch's loader takes them."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


def _batch_of(rows: Sequence[Any]) -> Any:
    """Put rows together. What is no tensor, a flag or None, is the batch's, not a row's."""
    return pytree.tree_map(
        lambda first, *others: (
            torch.stack([first, *others]) if isinstance(first, Tensor) else first
        ),
        *rows,
    )
