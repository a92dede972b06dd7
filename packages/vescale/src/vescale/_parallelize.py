"""Parallelize models that are real or deferred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

import vescale_deferred
import vescale_parallel
from vescale_deferred import RecordedDraws
from vescale_parallel import ParallelLoader, ParallelPlan

from ._save_pretrained import give_save_pretrained

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer | Sequence[Optimizer])
SchedulerT = TypeVar("SchedulerT")
LossFn = Callable[[Any, Any], Any]


@overload
def parallelize(
    plan: ParallelPlan,
    model: ModelT,
    optimizer_fn: None = None,
    lr_scheduler_fn: None = None,
    dataset: None = None,
    *,
    loss_fn: LossFn | None = None,
) -> ModelT: ...
@overload
def parallelize(
    plan: ParallelPlan,
    model: ModelT,
    optimizer_fn: Callable[[ModelT], OptimizerT] | type[OptimizerT],
    lr_scheduler_fn: None = None,
    dataset: None = None,
    *,
    loss_fn: LossFn | None = None,
) -> tuple[ModelT, OptimizerT]: ...
@overload
def parallelize(
    plan: ParallelPlan,
    model: ModelT,
    optimizer_fn: Callable[[ModelT], OptimizerT] | type[OptimizerT],
    lr_scheduler_fn: Callable[[OptimizerT], SchedulerT],
    dataset: None = None,
    *,
    loss_fn: LossFn | None = None,
) -> tuple[ModelT, OptimizerT, SchedulerT]: ...
@overload
def parallelize(
    plan: ParallelPlan,
    model: ModelT,
    optimizer_fn: None = None,
    lr_scheduler_fn: None = None,
    *,
    dataset: object,
    loss_fn: LossFn | None = None,
) -> tuple[ModelT, ParallelLoader]: ...
@overload
def parallelize(
    plan: ParallelPlan,
    model: ModelT,
    optimizer_fn: Callable[[ModelT], OptimizerT] | type[OptimizerT],
    lr_scheduler_fn: None = None,
    *,
    dataset: object,
    loss_fn: LossFn | None = None,
) -> tuple[ModelT, OptimizerT, ParallelLoader]: ...
@overload
def parallelize(
    plan: ParallelPlan,
    model: ModelT,
    optimizer_fn: Callable[[ModelT], OptimizerT] | type[OptimizerT],
    lr_scheduler_fn: None,
    dataset: object,
    *,
    loss_fn: LossFn | None = None,
) -> tuple[ModelT, OptimizerT, ParallelLoader]: ...
@overload
def parallelize(
    plan: ParallelPlan,
    model: ModelT,
    optimizer_fn: Callable[[ModelT], OptimizerT] | type[OptimizerT],
    lr_scheduler_fn: Callable[[OptimizerT], SchedulerT],
    dataset: object,
    *,
    loss_fn: LossFn | None = None,
) -> tuple[ModelT, OptimizerT, SchedulerT, ParallelLoader]: ...
@overload
def parallelize(
    plan: ParallelPlan,
    model: ModelT,
    optimizer_fn: Callable[[ModelT], Optimizer | Sequence[Optimizer]] | type[Any] | None = None,
    lr_scheduler_fn: Callable[[Any], Any] | None = None,
    dataset: object = None,
    *,
    loss_fn: LossFn | None = None,
) -> Any: ...
def parallelize(
    plan: ParallelPlan,
    model: nn.Module,
    optimizer_fn: Callable[[Any], Optimizer | Sequence[Optimizer]] | type[Any] | None = None,
    lr_scheduler_fn: Callable[[Any], Any] | None = None,
    dataset: Any | None = None,
    *,
    loss_fn: LossFn | None = None,
) -> Any:
    """Make a model, and what trains it, run as a plan says. Every rank must call this.

    The model is changed in place: it keeps its class, names and forward, its parameters
    become DTensors of global shape, and calls of it take this rank's part of a batch. Of a
    deferred model only the parts this rank owns are ever made. Starts the process group from
    torchrun's environment if nobody did; without torchrun the world is this process.

    Args:
        plan: What to do: from :func:`generate_plan`, from JSON, or written by hand.
        model: Any module, real or from :func:`deferred_init`. A pipeline needs less memory for a
            forward that returns its loss.
        optimizer_fn: Called on the parallelized model; returns a torch optimizer, or a list of
            several. Or the class of one, which is called on the model's parameters.
        lr_scheduler_fn: Called on the optimizer, or the list.
        dataset: A map-style or iterable data set, HuggingFace's too, or a ready ``DataLoader``
            whose batch size is that of the global batch. It becomes a loader of this rank's rows
            of every batch.
        loss_fn: Computes the loss from what forward returns and the targets, for a model that
            does not: ``loss = model(x, target=y)``. Other calls return the output. A pipeline
            runs the plan's schedule then, else all forward passes first.

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
    parts = vescale_parallel.parallelize(
        plan,
        model,
        optimizer_fn,
        lr_scheduler_fn,
        dataset,
        loss_fn=loss_fn,
        read=vescale_deferred.read,
        construction=_construction_of(model),
    )
    # What is left are tensors that the modules hold without having registered them.
    vescale_deferred.materialize(model)
    give_save_pretrained(model)
    return parts


@dataclass(frozen=True)
class _Construction:
    """What vescale-parallel asks about a deferred model."""

    model: nn.Module

    def fingerprint(self) -> str:
        return vescale_deferred.fingerprint(self.model)

    def fingerprints(self) -> dict[str, str]:
        return vescale_deferred.fingerprints(self.model)

    def recorded_draws(self) -> RecordedDraws:
        return vescale_deferred.recorded_draws(self.model)

    def replace_draws(self, draws: RecordedDraws) -> None:
        vescale_deferred.replace_draws(self.model, draws)


def _construction_of(model: object) -> _Construction | None:
    if isinstance(model, nn.Module) and vescale_deferred.is_deferred(model):
        return _Construction(model)
    return None
