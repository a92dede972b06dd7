"""Verify a plan: train on one device and under the plan, and compare everything."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.overrides import TorchFunctionMode

from vescale._emulate import emulate
from vescale._torch_private import pytree
from vescale_parallel import ParallelPlan, check_signature, observed_calls

from .bits import same_again, same_draws, same_initial, same_micro_batches
from .compare import same_first_gradients, within_rounding
from .host_generators import kept_host_state
from .perturb import perturbing
from .record import Record
from .report import Level, LevelResult, VerifyReport
from .rounding import Expected, is_rounding, largest
from .training import (
    LossOf,
    Program,
    default_loss_of,
    in_chunks,
    in_compiled_blocks,
    num_data_ranks,
    num_parts,
    num_rows,
    on_a_rank,
    on_one_device,
    rows_and_tokens,
    shard_after_shard,
)

_PERTURBATIONS = 2


def verify(
    plan: ParallelPlan,
    model_fn: Callable[[], nn.Module],
    batch: Any,
    *,
    steps: int = 3,
    optimizer_fn: Callable[[nn.Module], Optimizer] | None = None,
    loss_of: LossOf | None = None,
    max_grad_norm: float | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> VerifyReport:
    """Compare a plan with one device, and find the first place where they differ.

    The model is trained on one device, and by all ranks of the plan in this process
    (:func:`vescale.emulate`), twice. Under torchrun with as many ranks as the plan has, it is
    also trained by these. Compared are initial values, what every module returns, losses, every
    gradient, parameters and buffers after every step, and the state of the random generator.

    What rounding explains is measured, as TTrace does: one device trains from parameters that are
    off by one machine epsilon, too, with outputs of its innermost modules that are off by one. A
    tensor may be off by 16 times what it was then, or 32 epsilons of its largest element. The
    epsilon is that of the coarsest dtype in which the model computes, or has the plan compute
    (``precision``).

    Args:
        plan: What to verify.
        model_fn: Makes the model; called once for every run and rank. Under a pipeline the model
            returns its loss.
        batch: A global batch, or a list of one for every step: tensors with their rows along the
            first dim, in a tuple or a mapping.
        steps: How many steps of training to compare, if one batch is given.
        optimizer_fn: Called on the model; by default AdamW with a learning rate of 1e-3.
        loss_of: What the loop does from a batch to the loss, given model and batch. By default a
            mapping becomes keyword arguments where forward has such, a tuple positional ones,
            and what is returned is a loss or has one as ``.loss``.
        max_grad_norm: To what norm to clip gradients before the optimizer's step; None for not at
            all.
        dtype: What model and batch are cast to; None leaves them. In float64 rounding hides
            nothing.
        seed: Of the random generators.

    Returns:
        What came out at each level of the numeric contract.

    Raises:
        ValueError: If the rows of a batch do not divide by the ranks and micro-batches that share
            them, batches have no rows, the plan was made for another model, the model does not run
            in ``dtype``, or ``model_fn`` returns the same one twice.
        TypeError: If no loss is found, or a model is given and not a function.
        Exception: What the plan raises on any of its ranks.

    Source: the perturbed runs follow TTrace, https://arxiv.org/abs/2506.09280.

    Example:
        >>> import torch, vescale
        >>> plan = vescale.ParallelPlan()
        >>> class Net(torch.nn.Linear):
        ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
        ...         return super().forward(x).pow(2).mean()
        >>> report = vescale.verify(plan, lambda: Net(4, 2), torch.ones(8, 4), steps=1)
        >>> report.passed
        True
    """
    batches = batch if isinstance(batch, list) else [batch] * steps
    program = Program(
        model_fn=model_fn,
        # Tokenizers return mappings of their own.
        batches=[dict(each) if isinstance(each, Mapping) else each for each in batches],
        optimizer_fn=optimizer_fn or _adamw,
        loss_of=loss_of or default_loss_of,
        max_grad_norm=max_grad_norm,
        dtype=dtype,
        seed=seed,
    )
    _check_rows(program, plan)
    with _as_a_rank():
        check_signature(plan, _checked_model(model_fn))
        plan = replace(plan, model=None)  # which says of what dtypes parameters were
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return _under_torchrun(program, plan)
        return _report(plan, _runs(program, plan), None)


def _checked_model(model_fn: Callable[[], nn.Module]) -> nn.Module:
    if isinstance(model_fn, nn.Module):
        raise TypeError(
            "expected a function that makes the model, got a model; give "
            "lambda: copy.deepcopy(model)"
        )
    model = model_fn()
    if model_fn() is model:
        raise ValueError(
            "expected model_fn to make a new model in every call, got the same one twice; give "
            "lambda: copy.deepcopy(model)"
        )
    return model


@contextmanager
def _as_a_rank() -> Iterator[None]:
    """Compute with one thread, as a rank does, and leave no trace in generators."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(), kept_host_state():
            yield
    finally:
        torch.set_num_threads(threads)


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)


def _check_rows(program: Program, plan: ParallelPlan) -> None:
    shards = num_data_ranks(plan) * num_parts(plan)
    for batch in program.batches:
        rows = num_rows(batch)
        if rows % shards:
            raise ValueError(
                f"expected a batch of a multiple of {shards} rows, one for each data-parallel "
                f"rank and micro-batch, got {rows}"
            )


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """What is run in this process."""

    expected: Expected
    ranks: Sequence[Record]
    again: Sequence[Record]
    in_shards: Sequence[LevelResult]


def _runs(program: Program, plan: ParallelPlan) -> _Runs:
    expected = _expected(program, plan)
    ranks = emulate(on_a_rank, plan, args=(program, plan))
    in_shards = [_micro_batches(program, plan, expected, ranks)]
    if plan.numerics == "invariant":
        in_shards.append(_in_shards("N5", program, plan, expected, ranks))
    return _Runs(
        expected=expected,
        ranks=ranks,
        again=emulate(on_a_rank, plan, args=(program, plan)),
        in_shards=in_shards,
    )


def _report(plan: ParallelPlan, runs: _Runs, processes: Sequence[Record] | None) -> VerifyReport:
    record, ranks = runs.expected.record, runs.ranks
    repeated = [("emulated twice", ranks, runs.again)]
    if processes is not None:
        repeated.append(("emulated and in processes", ranks, processes))
    rounding = within_rounding(runs.expected, ranks, plan)
    fourth = LevelResult(
        level="N4",
        status="failed" if rounding.divergence else "passed",
        divergence=rounding.divergence,
    )
    third, *fifth = runs.in_shards
    return VerifyReport(
        levels=(
            same_initial(record, ranks),
            same_draws(record, ranks),
            same_again(repeated),
            third,
            fourth,
            *fifth,
        ),
        num_compared=rounding.num_compared,
        not_compared=rounding.not_compared,
    )


def _expected(program: Program, plan: ParallelPlan) -> Expected:
    dtypes = _Dtypes()

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        with dtypes:
            return program.loss_of(model, batch)

    try:
        record = on_one_device(replace(program, loss_of=loss_of))
    except RuntimeError as error:
        if program.dtype is None:
            raise
        name = str(program.dtype).removeprefix("torch.")
        raise ValueError(
            f"the model does not run in {name} on one device ({error}); give dtype=None to verify "
            "it as it is, or have it compute otherwise (of transformers' experts, "
            'config._experts_implementation = "eager")'
        ) from error
    said = plan.precision.param, plan.precision.reduce
    computed = dtypes.found | {getattr(torch, name) for name in said if name is not None}
    epsilon = max((torch.finfo(dtype).eps for dtype in computed), default=0.0)

    # Micro-batches draw one after the other, so their numbers are not those of a whole batch.
    in_shards = record.draws and num_parts(plan) > 1
    run = partial(shard_after_shard, plan=plan) if in_shards else on_one_device
    turned = _against_noise(program, epsilon)

    def perturbed(seed: int) -> Record:
        with perturbing(epsilon, seed) as change:
            return run(turned, change=change)

    return Expected(
        record=run(program) if in_shards else record,
        perturbed=[*map(perturbed, range(_PERTURBATIONS))],
        epsilon=epsilon,
        num_shards=num_data_ranks(plan) * num_parts(plan) if in_shards else 1,
        rows_and_tokens=rows_and_tokens(program.batches),
    )


class _Dtypes(TorchFunctionMode):
    """Collects the floating-point dtypes of what torch's functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.found.add(leaf.dtype)
        return result


def _against_noise(program: Program, epsilon: float) -> Program:
    """Return a program whose optimizer gets gradients that are nothing but rounding turned around.

    They are what is left of terms that cancel, often the same bits from parameters that are a
    little off, so another order of the sum would seem to be more than rounding. An optimizer that
    divides by their size steps by them as far as by others, which the next step shows. What is
    zero stays: adapters are trained from there.
    """

    def optimizer_fn(model: nn.Module) -> Optimizer:
        optimizer = program.optimizer_fn(model)

        def change(*_: Any) -> None:
            given = [p.grad for group in optimizer.param_groups for p in group["params"]]
            grads = [grad for grad in given if grad is not None]
            of_step = max(map(largest, grads), default=0.0)
            for grad in grads:
                if is_rounding(largest(grad), of_step, epsilon):
                    grad.neg_()

        optimizer.register_step_pre_hook(change)
        return optimizer

    return replace(program, optimizer_fn=optimizer_fn)


def _micro_batches(
    program: Program, plan: ParallelPlan, expected: Expected, ranks: Sequence[Record]
) -> LevelResult:
    """N3, where the plan promises bits."""
    cut = [name for name in ("tp", "cp", "ep") if plan.axes[name] > 1]
    if cut or plan.numerics == "invariant":
        text = f"{' and '.join(cut) or 'numerics'} sum in another order than one device"
        return LevelResult(level="N3", status="does not apply", text=text)
    return _in_shards("N3", program, plan, expected, ranks)


def _in_shards(
    level: Level,
    program: Program,
    plan: ParallelPlan,
    expected: Expected,
    ranks: Sequence[Record],
) -> LevelResult:
    """N3, N5: compare bits with one device's, shard after shard, where a plan promises them."""
    reason = ""
    if plan.data_parallel.reduction != "ordered":
        reason = "data_parallel.reduction is the library's"
    elif plan.precision.param or plan.precision.reduce:
        reason = "other dtypes than the model's"
    elif plan.batch.gradient_accumulation > 1 and plan.data_parallel.zero_stage >= 2:
        reason = "gradients of blocks are reduced for every micro-batch, others once a step"
    elif expected.record.draws and num_parts(plan) == 1:
        reason = "random numbers are drawn for whole batches"
    if reason:
        return LevelResult(level=level, status="does not apply", text=reason)
    if level == "N3" and plan.compile == "none":
        reference = shard_after_shard(program, plan)
    else:
        alone = in_chunks if level == "N5" else in_compiled_blocks
        reference = emulate(alone, 1, args=(program, plan))[0]
    if not same_first_gradients(expected, reference):
        return LevelResult(
            level=level,
            status="does not apply",
            text="the loss is no mean over shards of the batch: what rows share is computed whole",
        )
    tied = _tied(program, plan) if plan.axes["pp"] > 1 else ()
    text = f"first gradients, without what is tied over stages: {', '.join(tied)}" if tied else ""
    return same_micro_batches(level, reference, ranks, tied, text)


def _tied(program: Program, plan: ParallelPlan) -> tuple[str, ...]:
    """Return parameters whose gradient may be a sum of several stages': tied, or used again."""
    model, pipeline = program.build(), plan.pipeline_parallel
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # By a module and by code around modules, behind several blocks, or in a block called twice.
    block_calls, behind = observed_calls(model, program.batches[0], pipeline.block_calls)
    again = [fqn for fqn, count in Counter(block_calls).items() if count > 1]
    again += [
        fqn
        for fqn, at in {**behind, **pipeline.called_behind}.items()
        if len(at) > 1 or any(fqn in found for found in names.values())
    ]
    return tuple(
        found[0]
        for found in names.values()
        if len(found) > 1
        or any(f"{name}.".startswith(f"{fqn}.") for name in found for fqn in again)
    )


def _under_torchrun(program: Program, plan: ParallelPlan) -> VerifyReport:
    """Have the ranks of torchrun train, too; the first of them emulates before they meet."""
    plan.check_world_size(int(os.environ["WORLD_SIZE"]))
    if dist.is_initialized():
        raise ValueError("expected verify to be called before torch.distributed is initialized")
    runs = _runs(program, plan) if os.environ["RANK"] == "0" else None
    dist.init_process_group()
    batches = [program.batches]
    dist.broadcast_object_list(batches)  # a script may draw its batch
    own = on_a_rank(replace(program, batches=batches[0]), plan)
    records: list[Any] | None = None if runs is None else [None] * plan.world_size
    dist.gather_object(own, records)
    report = [None if runs is None else _report(plan, runs, records)]
    dist.broadcast_object_list(report)
    assert report[0] is not None
    return report[0]
