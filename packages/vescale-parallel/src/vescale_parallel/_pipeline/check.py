"""Can a model be run as a pipeline? Every stage runs forward on shapes, before any rank does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._loss.output import is_loss
from vescale_parallel._model.copies import copied_without_hooks, meta_parameter, on_meta
from vescale_parallel._model.inputs import bind, opened
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.fake_tensors import ObservationError

from .call_order import places_seen, with_stages
from .cuts.placeholders import Placeholder
from .cuts.values import Cuts, ObservedValues
from .stage_assignment import StageMap, stage_map
from .stage_module import StageDone, StageRun, Staging, stage_model


def check_pipeline(plan: ParallelPlan, model: nn.Module, batch: Any) -> None:
    """Raise what the stages of a pipeline would raise for a batch. Nobody communicates.

    The stages run one after the other on the meta device, with the code that runs them on ranks.

    Args:
        plan: How the model is cut.
        model: Real, on the meta device, or deferred; not changed.
        batch: What one micro-batch looks like.

    Raises:
        ValueError: If the model cannot be cut as the plan says, if a stage needs what it cannot
            be sent, or if forward returns no loss. An ObservationError if that cannot be said,
            since forward needs values.

    Example:
        >>> check_pipeline(ParallelPlan(), nn.Linear(2, 2), torch.ones(1, 2))
    """
    if plan.pipeline_parallel.size == 1:
        return
    plan = with_stages(plan, model, batch)
    stages = stage_map(plan, model, places_seen(plan, model, batch))
    assert stages is not None
    copied = copied_without_hooks(model, meta_parameter, on_meta)
    args, kwargs = bind(copied, pytree.tree_map_only(Tensor, on_meta, opened(batch)))
    staging = Staging()
    stage_model(copied, stages, staging, None)
    usable = Placeholder.usable
    try:
        _run_all(copied, stages, staging, args, kwargs)
    except ValueError:
        raise
    except Exception as error:
        raise ObservationError(
            f"expected a forward that runs on shapes alone, to see whether its blocks make a "
            f"pipeline, got {type(error).__name__}: {error}"
        ) from error
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
    num_blocks, sent = len(stages.blocks), list[Tensor]()
    ends = [*stages.starts[1:], num_blocks]
    for stage, (start, end) in enumerate(zip(stages.starts, ends, strict=True)):
        last = stage == stages.num_stages - 1
        takes, sends = cuts.get(start, ()) if stage else (), cuts.get(end, ())
        received = [torch.empty_like(x, device="meta").detach() for x in sent]
        given = [x.requires_grad_(x.is_floating_point()).view_as(x) for x in received]
        staging.run = StageRun(stage, start, end, last, lambda _, x=given: x, takes, sends)
        # As in the runtime: the first stage needs none.
        Placeholder.usable = stage > 0
        try:
            with torch.device("meta"), torch.enable_grad(), staging.run.running():
                output = model(*args, **kwargs)
        except StageDone as done:
            sent = [*done.activations]
            continue
        staging.run.check_complete(num_blocks)
        if not any(map(is_loss, pytree.tree_leaves(output))):
            raise ValueError(
                "pipeline parallelism needs a module whose forward returns its loss (a scalar "
                f"tensor, or a structure with one), got {type(output).__name__}"
            )


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
    with torch.device("meta"), torch.no_grad(), staging.run.running():
        output = model(*args, **kwargs)
    return values.cuts(output, losses_only=True)
