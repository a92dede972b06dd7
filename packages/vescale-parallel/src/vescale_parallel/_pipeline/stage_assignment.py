"""Which pipeline stage uses which parameter."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from vescale_parallel._model.blocks import pipeline_blocks
from vescale_parallel._plan.plan import ParallelPlan

from .partition import stage_starts

_Where = Literal["before", "after"]


@dataclass(frozen=True)
class StageMap:
    """Where the parts of a model run.

    Attributes:
        blocks: FQNs of the blocks, in order.
        starts: Index of the first block of every stage.
        outside: FQN of every outermost module with parameters outside the blocks, to its
            stage: the first if it is called before the blocks, else the last.
    """

    blocks: Sequence[str]
    starts: Sequence[int]
    outside: Mapping[str, int]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.starts)

    @property
    def stage_of_modules(self) -> dict[str, int]:
        """The stage of every block and every module outside of them."""
        blocks = {fqn: self.stage_of_block(index) for index, fqn in enumerate(self.blocks)}
        return blocks | dict(self.outside)

    def stage_of_block(self, index: int) -> int:
        """Return the stage that owns block ``index``."""
        return bisect.bisect_right(self.starts, index) - 1

    def stages_of(self, fqns: Iterable[str]) -> tuple[int, ...]:
        """Return the stages that use a parameter, given all its names; the owner first."""
        stages: set[int] = set()
        for fqn in fqns:
            stages |= set(self._stages_of_name(fqn))
        return tuple(sorted(stages))

    def _stages_of_name(self, fqn: str) -> tuple[int, ...]:
        for index, block in enumerate(self.blocks):
            if fqn.startswith(f"{block}."):
                return (self.stage_of_block(index),)
        for module, stage in self.outside.items():
            if fqn.startswith(f"{module}."):
                return (stage,)
        # Held by a module around the blocks: its forward may use it before or after them.
        return (0, self.num_stages - 1)


def stage_map(plan: ParallelPlan, model: nn.Module) -> StageMap | None:
    """Return where the parts of a model run, None without pipeline parallelism.

    Raises:
        ValueError: If the model cannot be cut as the plan says.
    """
    if plan.pipeline_parallel.size == 1:
        return None
    blocks = pipeline_blocks(model)
    starts = stage_starts(plan, model, blocks)
    called = dict(modules_outside_blocks(model))
    pipeline = plan.pipeline_parallel
    _move(called, pipeline.head_modules, "before", "pipeline_parallel.head_modules")
    _move(called, pipeline.tail_modules, "after", "pipeline_parallel.tail_modules")
    last = len(starts) - 1
    outside = {fqn: last if where == "after" else 0 for fqn, where in called.items()}
    return StageMap(blocks, starts, outside)


def _move(called: dict[str, _Where], fqns: Sequence[str], where: _Where, key: str) -> None:
    """Have modules outside the blocks be called before or after them, as a plan's key says."""
    unknown = [fqn for fqn in fqns if fqn not in called]
    if unknown:
        raise ValueError(
            f"{key}: {unknown[0]!r} is no module with parameters "
            f"outside the blocks; those are {sorted(called)}"
        )
    called |= dict.fromkeys(fqns, where)


def modules_outside_blocks(model: nn.Module) -> dict[str, _Where]:
    """Return every outermost module with parameters outside the pipeline's blocks.

    Returns:
        Its FQN, to whether it is defined before or after the blocks. Most models call their
        modules in the order of definition; ``pipeline_parallel.head_modules`` and
        ``tail_modules`` are for others.
    """
    blocks = pipeline_blocks(model)
    found: dict[str, _Where] = {}
    where: _Where = "before"

    def visit(module: nn.Module, prefix: str) -> None:
        nonlocal where
        for name, child in module.named_children():
            fqn = prefix + name
            if fqn in blocks:
                where = "after"
            elif any(block.startswith(f"{fqn}.") for block in blocks):
                visit(child, f"{fqn}.")
            elif any(True for _ in child.parameters()):
                found[fqn] = where

    visit(model, "")
    return found
