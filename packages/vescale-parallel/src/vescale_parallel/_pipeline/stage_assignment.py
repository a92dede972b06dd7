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


@dataclass(frozen=True)
class StageMap:
    """Where the parts of a model run.

    Attributes:
        blocks: FQNs of the blocks, in order.
        starts: Index of the first block of every stage.
        outside: FQN of every outermost module with parameters outside the blocks, to its
            stage: the first if it is defined before the blocks, else the last.
    """

    blocks: Sequence[str]
    starts: Sequence[int]
    outside: Mapping[str, int]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.starts)

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
    tail = plan.pipeline_parallel.tail_modules
    defined = modules_outside_blocks(model)
    unknown = [fqn for fqn in tail if fqn not in defined]
    if unknown:
        raise ValueError(
            f"pipeline_parallel.tail_modules: {unknown[0]!r} is no module with parameters "
            f"outside the blocks; those are {sorted(defined)}"
        )
    outside = {
        fqn: len(starts) - 1 if where == "after" or fqn in tail else 0
        for fqn, where in defined.items()
    }
    return StageMap(blocks, starts, outside)


def modules_outside_blocks(model: nn.Module) -> dict[str, Literal["before", "after"]]:
    """Return every outermost module with parameters outside the pipeline's blocks.

    Returns:
        Its FQN, to whether it is defined before or after the blocks. Most models call their
        modules in the order of definition; ``pipeline_parallel.tail_modules`` is for others.
    """
    blocks = pipeline_blocks(model)
    found: dict[str, Literal["before", "after"]] = {}
    where: Literal["before", "after"] = "before"

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
