"""Where between the blocks other modules are called, seen in a run on an example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import package_logger
from vescale_parallel._model.blocks import pipeline_blocks
from vescale_parallel._model.copies import copied_without_hooks
from vescale_parallel._model.inputs import bind, opened
from vescale_parallel._plan.plan import ParallelPlan

from .cuts.values import Name, Values
from .stage_assignment import StageMap, modules_outside_blocks
from .stage_module import StageRun, Staging, stage_model

_log = package_logger(__name__)


class _Places(Values):
    """Notes how many blocks have been called before every call of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.behind: dict[str, list[int]] = {}

    def of_call(self, fqn: str) -> Name:
        self.behind.setdefault(fqn, []).append(self.blocks_called)
        return super().of_call(fqn)


def places_seen(plan: ParallelPlan, model: nn.Module, batch: Any) -> Mapping[str, tuple[int, ...]]:
    """Return how many blocks have been called before each call of modules outside the blocks.

    The model's own code is run on the batch with placeholders for what has parameters. Nothing is
    returned of models whose code cannot be run so: their modules are where they are defined.
    """
    return {} if plan.pipeline_parallel.size == 1 else _places_in(model, batch)


def calls_between_blocks(model: nn.Module, batch: Any) -> dict[str, tuple[str, ...]]:
    """Return the blocks behind which modules outside of them are called, as plans have it.

    Of those that are called between blocks, or in several places; ``""`` is before all blocks. The
    model's own code is run on the batch without its parameters; models that do not run so have
    none.

    Args:
        model: Real, on the meta device, or deferred; not changed.
        batch: An example; None if there is none.

    Example:
        >>> calls_between_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2))
        {}
    """
    blocks = ("", *pipeline_blocks(model))
    found = {fqn: sorted({*counts}) for fqn, counts in _places_in(model, batch).items()}
    at_ends = [0], [len(blocks) - 1]
    return {
        fqn: tuple(blocks[count] for count in counts)
        for fqn, counts in found.items()
        if counts not in at_ends
    }


def _places_in(model: nn.Module, batch: Any) -> dict[str, tuple[int, ...]]:
    if batch is None:
        return {}
    blocks, outside = pipeline_blocks(model), modules_outside_blocks(model)
    places = _Places()
    try:
        copied = copied_without_hooks(model, _no_parameter, _no_buffer)
        staging = Staging()
        names = {fqn: copied.get_submodule(fqn) for fqn in outside}
        stage_model(copied, StageMap(blocks, [0], dict.fromkeys(outside, 0)), staging, None)
        args, kwargs = bind(copied, opened(batch))
        staging.run = StageRun.counting(len(blocks), places)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copied(*args, **kwargs)
    # Whatever a model's own code does when it runs where it was not made for. Where a module is
    # on another stage than is right, its call there is refused by name.
    except Exception as error:
        _log.info("modules outside the blocks are where they are defined: %r", error)
        return {}
    finally:
        places.release()
    # A module may have several names.
    seen = {names[fqn]: tuple(found) for fqn, found in places.behind.items() if fqn in names}
    return {fqn: seen[module] for fqn, module in names.items() if module in seen}


def _no_parameter(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_zeros(parameter), requires_grad=False)


def _no_buffer(buffer: Tensor) -> Tensor:
    """Return a buffer as it is, or zeros for one that has no values yet."""
    return buffer if type(buffer) is Tensor and not buffer.is_meta else _zeros(buffer).contiguous()


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype).expand(like.shape)
