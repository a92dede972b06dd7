"""Can a model be run in micro-batches? Not where rows of different ones depend on each other."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from vescale_parallel._model.inputs import bind
from vescale_parallel._plan.plan import ParallelPlan

from .batches.graphs import refused_parts
from .borders import RowCoupling
from .call_guard import RowGuard


def check_micro_batches(plan: ParallelPlan, model: nn.Module, batch: Any) -> None:
    """Raise what a call in micro-batches would raise for a batch. Nobody communicates.

    Where it cannot be checked whether rows depend on each other, the first call warns, and
    nothing is raised.

    Args:
        plan: How the rows of the batch are divided.
        model: Real, on the meta device, or deferred; not changed.
        batch: What one rank gives the model, or a few rows of it.

    Raises:
        ValueError: If the plan runs rows one part after the other that depend on each other.

    Example:
        >>> check_micro_batches(ParallelPlan(), nn.Linear(2, 2), torch.ones(4, 2))
    """
    pipelined = plan.pipeline_parallel.size > 1
    num_parts = plan.data_parallel.size * plan.num_microbatches
    if num_parts == 1 or not (pipelined or plan.batch.gradient_accumulation > 1):
        return
    guard = RowGuard(model, lambda own: [own], losses_only=pipelined, in_one_piece=False)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # the first call gives them
        coupling, _ = guard.coupling(model, *bind(model, batch))
    coupling = coupling if coupling.apart is None else coupling.apart
    by = "a pipeline" if pipelined else "batch.gradient_accumulation"
    refuse_parts(coupling, by)
    if coupling.regions:
        raise ValueError(refused_regions(coupling, by, num_parts))


def refuse_parts(coupling: RowCoupling, in_parts_by: str) -> None:
    """Raise if a call in micro-batches leaves something behind that rows depend on.

    Raises:
        ValueError: If it does.
    """
    if coupling.of_graphs:
        raise ValueError(refused_parts(in_parts_by))
    if coupling.written:
        raise ValueError(_refused_writes(coupling, in_parts_by))
    if coupling.rows_read and torch.is_grad_enabled():
        raise ValueError(_refused_rows(coupling, in_parts_by))


def refused_regions(coupling: RowCoupling, in_parts_by: str, num_parts: int) -> str:
    """Return what to say of rows that depend on each other in micro-batches."""
    # Which gives the loop the outputs of all micro-batches.
    of_loop = (
        ", or, with data_parallel.size 1, compute the loss in the loop, of what forward returns"
    )
    return (
        f"rows of the batch depend on each other ({listed(coupling)}), but {in_parts_by} runs it "
        f"in {num_parts} micro-batches, one after the other. Use pipeline_parallel.size 1 and "
        "batch.gradient_accumulation 1, under which data-parallel ranks compute that code over "
        "the whole batch, or a loss that is a mean over rows (F.cross_entropy counts the "
        f"targets of all micro-batches){of_loop if in_parts_by == 'a pipeline' else ''}"
    )


def listed(coupling: RowCoupling) -> str:
    """Return where rows depend on each other, and why, as text."""
    return "; ".join(f"{fqn or 'the model'!r}: {why}" for fqn, why in coupling.regions.items())


def _refused_writes(coupling: RowCoupling, in_parts_by: str) -> str:
    names = ", ".join(sorted(coupling.written))
    return (
        f"forward writes to parameters ({names}), but {in_parts_by} runs it several times a step. "
        "Write to them after optimizer.step(), make them buffers, or use pipeline_parallel.size 1 "
        "and batch.gradient_accumulation 1"
    )


def _refused_rows(coupling: RowCoupling, in_parts_by: str) -> str:
    names = ", ".join(map(repr, sorted(coupling.rows_read)))
    return (
        f"forward keeps {names} for every row of a batch and computes with it in the next call, "
        f"but {in_parts_by} runs it in micro-batches, each of other rows. Use "
        "pipeline_parallel.size 1 and batch.gradient_accumulation 1, or give it to the model with "
        "the batch"
    )
