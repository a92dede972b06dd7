"""Parallelize models that are real or deferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

import vescale_deferred
import vescale_parallel
from vescale_parallel import ParallelPlan

from ._save_pretrained import give_save_pretrained


def parallelize(
    plan: ParallelPlan,
    model: nn.Module,
    optimizer_fn: Callable[[nn.Module], Optimizer] | None = None,
    lr_scheduler_fn: Callable[[Optimizer], Any] | None = None,
    dataset: Any | None = None,
) -> Any:
    """Make a model, and what trains it, run as a plan says. Every rank must call this.

    The model is changed in place: it keeps its class, names and forward, its parameters
    become DTensors of global shape, and calls of it take this rank's part of a batch. Of a
    deferred model only the parts this rank owns are ever made. Starts the process group from
    torchrun's environment if nobody did; without torchrun the world is this process.

    Args:
        plan: What to do: from :func:`generate_plan`, from JSON, or written by hand.
        model: Any module, real or from :func:`deferred_init`. Under pipeline parallelism its
            forward returns its loss.
        optimizer_fn: Called on the parallelized model; returns a torch optimizer.
        lr_scheduler_fn: Called on the optimizer.
        dataset: A map-style data set; becomes a loader of this rank's rows of every batch.

    Returns:
        The model; or a tuple of the model, optimizer, scheduler and loader, one for each
        thing that was given, in that order.

    Raises:
        ValueError: If the plan does not fit the world size or the model, or ranks were given
            different plans or models. Nothing has been changed then.
        TypeError: If an argument is of the wrong kind.

    Example:
        >>> import torch
        >>> model = parallelize(ParallelPlan(), torch.nn.Linear(4, 2))
        >>> model(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    deferred = vescale_deferred.is_deferred(model)
    parts = vescale_parallel.parallelize(
        plan,
        model,
        optimizer_fn,
        lr_scheduler_fn,
        dataset,
        read=vescale_deferred.read,
        construction=vescale_deferred.fingerprint(model) if deferred else "",
    )
    # What is left are tensors that the modules hold without having registered them.
    vescale_deferred.materialize(model)
    give_save_pretrained(model)
    return parts
