"""Can a model be run as a pipeline? Every stage runs forward on shapes, before any rank does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vescale_dtensor import package_logger
from vescale_parallel._loss.output import is_loss
from vescale_parallel._model.copies import (
    copied_without_hooks,
    meta_parameter,
    on_meta,
    own_containers,
    writable,
)
from vescale_parallel._model.inputs import bind, opened
from vescale_parallel._model.structures import open_objects
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.fake_tensors import ObservationError
from vescale_parallel._trace.generators import untouched_generators

from .call_order import no_buffer, no_parameter, staged
from .cuts.placeholders import Placeholder, placeholder
from .cuts.values import Cuts, ObservedValues
from .stage_assignment import StageMap, stage_map
from .stage_module import StageDone, StageRun, Staging, compute_nothing, stage_model

_log = package_logger(__name__)


def check_pipeline(plan: ParallelPlan, model: nn.Module, batch: Any) -> None:
    """Raise what the stages of a pipeline would raise for a batch. Nobody communicates.

    The stages run one after the other, with the code that runs them on ranks, on the example's
    values and without those of parameters: modules return zeros.

    Args:
        plan: How the model is cut.
        model: Real, on the meta device, or deferred; not changed.
        batch: What one micro-batch looks like.

    Raises:
        ValueError: If the model cannot be cut as the plan says, or if a stage needs what it cannot
            be sent. An ObservationError if that cannot be said, since forward needs values.

    Example:
        >>> check_pipeline(ParallelPlan(), nn.Linear(2, 2), torch.ones(1, 2))
    """
    if plan.pipeline_parallel.size == 1:
        return
    plan, seen = staged(plan, model, batch)
    stages = stage_map(plan, model, seen)
    assert stages is not None
    batch = opened(batch)
    has_values = not any(x.is_meta for x in pytree.tree_leaves(batch) if isinstance(x, Tensor))
    try:
        if has_values:
            _check(model, stages, batch, no_parameter, no_buffer)
            return
    except ValueError:
        raise
    # Code that was not made for where it runs here: shapes alone may do.
    except Exception as error:
        _log.debug("stages are tried on shapes alone: %r", error)
    batch = pytree.tree_map_only(Tensor, on_meta, batch)
    try:
        with torch.device("meta"):
            _check(model, stages, batch, meta_parameter, on_meta)
    except ValueError:
        raise
    except Exception as error:
        raise ObservationError(
            f"expected a forward that runs on shapes alone, to see whether its blocks make a "
            f"pipeline, got {type(error).__name__}: {error}"
        ) from error


def _check(
    model: nn.Module,
    stages: StageMap,
    batch: Any,
    make_parameter: Callable[[nn.Parameter], nn.Parameter],
    make_buffer: Callable[[Tensor], Tensor],
) -> None:
    """Run all stages: what is between modules computes, modules return zeros."""
    copied = copied_without_hooks(model, make_parameter, make_buffer)
    args, kwargs = bind(copied, batch)
    staging = Staging(alike={})
    stage_model(copied, stages, staging, None)
    compute_nothing(copied)
    usable = Placeholder.usable
    try:
        with untouched_generators():
            _run_all(copied, stages, staging, args, kwargs)
    finally:
        Placeholder.usable = usable


def _run_all(
    model: nn.Module,
    stages: StageMap,
    staging: Staging,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run every stage on what the one before it sends."""
    cuts = _observed(model, stages, staging, args, kwargs)
    users = _users_of_parameters(model, stages)
    num_blocks, sent = len(stages.blocks), list[Tensor]()
    ends = [*stages.starts[1:], num_blocks]
    for stage, (start, end) in enumerate(zip(stages.starts, ends, strict=True)):
        last = stage == stages.num_stages - 1
        takes, sends = cuts.get(start, ()) if stage else (), cuts.get(end, ())
        received = [torch.zeros_like(x).detach() for x in sent]
        given = [
            writable(x.requires_grad_(x.is_floating_point() or x.is_complex())) for x in received
        ]
        staging.run = StageRun(stage, start, end, last, lambda _, x=given: x, takes, sends)
        # As in the runtime: the first stage needs none.
        Placeholder.usable = stage > 0
        try:
            with (
                torch.enable_grad(),
                _without_others(model, users, stage),
                staging.run.running(),
            ):
                given_args, given_kwargs = own_containers((args, kwargs))
                model(*given_args, **given_kwargs)
        except StageDone as done:
            sent = [*done.activations]
            continue
        staging.run.check_complete(stages.blocks)


def _observed(
    model: nn.Module,
    stages: StageMap,
    staging: Staging,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Cuts:
    values = ObservedValues()
    staging.run = StageRun.counting(len(stages.blocks), values)
    Placeholder.usable = True
    with torch.no_grad(), staging.run.running():
        given_args, given_kwargs = own_containers((args, kwargs))
        output = model(*given_args, **given_kwargs)
        open_objects(output)
    has_loss = any(map(is_loss, pytree.tree_leaves(output)))
    return values.cuts(output, losses_only=has_loss)


def _users_of_parameters(
    model: nn.Module, stages: StageMap
) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the stages that use each parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(fqn)
    return {p: stages.stages_of(fqns) for p, fqns in names.items()}


@contextlib.contextmanager
def _without_others(
    model: nn.Module, users: Mapping[nn.Parameter, tuple[int, ...]], stage: int
) -> Iterator[None]:
    """Have placeholders for the parameters of other stages within this, as ranks have."""
    held = {
        (module, name): p
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None and stage not in users[p]
    }
    try:
        for (module, name), p in held.items():
            hidden = placeholder(p.shape, p.dtype, p.device)
            module._parameters[name] = cast("nn.Parameter", hidden)
        yield
    finally:
        for (module, name), p in held.items():
            module._parameters[name] = p
