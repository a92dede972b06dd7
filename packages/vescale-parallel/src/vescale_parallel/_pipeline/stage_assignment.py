"""Which pipeline stage uses which parameter."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from vescale_parallel._model.blocks import is_called, pipeline_blocks
from vescale_parallel._plan.pipeline_schedules import StagePlacement
from vescale_parallel._plan.plan import ParallelPlan

from .cuts.block_calls import called_blocks, names_of_calls
from .cuts.partition import stage_starts

_Where = Literal["before", "after"]
_BEHIND = "pipeline_parallel.called_behind"


@dataclass(frozen=True)
class StageMap:
    """Where the parts of a model run.

    Attributes:
        blocks: FQNs of the blocks in the order of their calls; one that is called more than once
            is there as often, see [Note: blocks that are called more than once].
        starts: Index of the first call of a block of every stage.
        outside: FQN of every outermost module with parameters outside the blocks, to its
            stage: that of the block behind which it is called, the first before all blocks.
        again: Further stages of those that are called in several places.
        aliases: Further names of blocks.
        used: Stages whose code around modules uses a parameter outside of the blocks, by its FQN.
        parts: Stages of modules within blocks that are called outside of their block, too, its
            own stages among them.
    """

    blocks: Sequence[str]
    starts: Sequence[int]
    outside: Mapping[str, int]
    again: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    used: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.starts)

    @property
    def distinct_blocks(self) -> tuple[str, ...]:
        """FQNs of the blocks, each once."""
        return tuple(dict.fromkeys(self.blocks))

    def blocks_of_one_rank(self, placement: StagePlacement) -> tuple[str, ...]:
        """Return the blocks that one rank calls, with all of their parts.

        Those of several are sent from rank to rank before a step, and so are whole during it.
        """
        stages = {fqn: {*self.stages_of_calls[fqn]} for fqn in self.distinct_blocks}
        for part, of_part in self.parts.items():
            for fqn in self.distinct_blocks:
                stages[fqn] |= {*of_part} if part.startswith(f"{fqn}.") else set()
        ranks = {fqn: {*map(placement.rank_of, found)} for fqn, found in stages.items()}
        return tuple(fqn for fqn, found in ranks.items() if len(found) == 1)

    @property
    def stages_of_calls(self) -> dict[str, tuple[int, ...]]:
        """The stage of every call of every block, and one for each module outside of them."""
        calls: dict[str, tuple[int, ...]] = {}
        for index, fqn in enumerate(self.blocks):
            calls[fqn] = (*calls.get(fqn, ()), self.stage_of_block(index))
        return calls | {fqn: (stage,) for fqn, stage in self.outside.items()}

    def calls_of_block(self, fqn: str) -> tuple[int, ...]:
        """Return which calls of blocks are those of one."""
        return tuple(index for index, each in enumerate(self.blocks) if each == fqn)

    def stage_of_block(self, index: int) -> int:
        """Return the stage that makes call ``index`` of a block."""
        return bisect.bisect_right(self.starts, index) - 1

    def stage_behind(self, num_blocks: int) -> int:
        """Return the stage that runs what comes when so many blocks have been called."""
        return self.stage_of_block(max(num_blocks - 1, 0))

    def stages_of_module(self, fqn: str) -> tuple[int, ...]:
        """Return the stages that call a module outside the blocks."""
        return (self.outside[fqn], *self.again.get(fqn, ()))

    def stages_of(self, fqns: Iterable[str]) -> tuple[int, ...]:
        """Return the stages that use a parameter, given all its names; the owner first."""
        stages: set[int] = set()
        for fqn in fqns:
            stages |= {*self._stages_of_name(fqn), *self.used.get(fqn, ())}
            for part, found in self.parts.items():
                stages |= {*found} if fqn.startswith(f"{part}.") else set()
        return tuple(sorted(stages))

    def _stages_of_name(self, fqn: str) -> tuple[int, ...]:
        for name in (*self.distinct_blocks, *self.aliases):
            if fqn.startswith(f"{name}."):
                calls = self.calls_of_block(self.aliases.get(name, name))
                return tuple({self.stage_of_block(index) for index in calls})
        for module in self.outside:
            if fqn.startswith(f"{module}."):
                return self.stages_of_module(module)
        # Of code around the blocks: where no example was seen, it may be used before or after.
        return (0, self.num_stages - 1)


def stage_map(
    plan: ParallelPlan, model: nn.Module, seen: Mapping[str, tuple[int, ...]] | None = None
) -> StageMap | None:
    """Return where the parts of a model run, None without pipeline parallelism.

    ``seen`` tells of modules outside the blocks, and of those within that are called outside of
    their block, how many blocks have been called before each of their calls, and of parameters
    outside before each use by code around modules; others are where they are defined.

    Raises:
        ValueError: If the model cannot be cut as the plan says.
    """
    if plan.pipeline_parallel.size == 1:
        return None
    blocks = called_blocks(plan, model)
    starts = stage_starts(plan, model, names_of_calls(plan, model))
    behind = places_outside(plan, model, seen)
    stages = StageMap(blocks, starts, {})
    owners = {fqn: sorted({stages.stage_behind(n) for n in at}) for fqn, at in behind.items()}
    again = {fqn: more for fqn, (_, *more) in owners.items() if more}
    outside = {fqn: first for fqn, (first, *_) in owners.items()}
    uses = _uses_of_parameters(plan, model, seen or {})
    used = {fqn: sorted({stages.stage_behind(n) for n in at}) for fqn, at in uses.items()}
    parts = {
        fqn: tuple(sorted({stages.stage_behind(n) for n in at} | {*stages.stages_of([f"{fqn}."])}))
        for fqn, at in places_of_parts(plan, model, seen).items()
    }
    return StageMap(blocks, starts, outside, again, _aliases(model, blocks), used, parts)


def held_around(model: nn.Module, blocks: Sequence[str]) -> dict[str, bool]:
    """Return the parameters outside of blocks, which code around modules may use.

    Returns:
        The first FQN of each, to whether a module that is called holds it. Those of a module
        around the blocks, or of an ``nn.ParameterList``, are used by such code alone.
    """
    inside = {id(p) for fqn in blocks for p in model.get_submodule(fqn).parameters()}
    called = modules_outside_blocks(model, blocks)
    return {
        fqn: any(fqn.startswith(f"{each}.") for each in called)
        for fqn, parameter in model.named_parameters()
        if id(parameter) not in inside
    }


def _uses_of_parameters(
    plan: ParallelPlan, model: nn.Module, seen: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return behind how many blocks code around modules uses parameters outside of them."""
    blocks, names = called_blocks(plan, model), names_of_calls(plan, model)
    held = held_around(model, blocks)
    uses = {fqn: at for fqn, at in seen.items() if fqn in held}
    said = plan.pipeline_parallel.called_behind
    return uses | {fqn: _counts(fqn, at, names, model) for fqn, at in said.items() if fqn in held}


def places_of_parts(
    plan: ParallelPlan, model: nn.Module, seen: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return behind how many blocks modules within blocks are called outside of their block.

    Outermost first; arguments are those of :func:`stage_map`.
    """
    blocks, names = called_blocks(plan, model), names_of_calls(plan, model)
    said = {
        fqn: at for fqn, at in plan.pipeline_parallel.called_behind.items() if is_part(fqn, blocks)
    }
    known = {fqn for fqn, _ in model.named_modules()}
    if unknown := [fqn for fqn in said if fqn not in known]:
        raise ValueError(f"{_BEHIND}: {unknown[0]!r} is no module of {type(model).__name__}")
    found = {fqn: at for fqn, at in (seen or {}).items() if is_part(fqn, blocks)}
    found |= {fqn: _counts(fqn, at, names, model) for fqn, at in said.items()}
    return dict(sorted(found.items(), key=lambda each: len(each[0])))


def is_part(fqn: str, blocks: Sequence[str]) -> bool:
    """Whether something is within one of the blocks."""
    return any(fqn.startswith(f"{block}.") for block in blocks)


def _aliases(model: nn.Module, blocks: Sequence[str]) -> dict[str, str]:
    names = {model.get_submodule(fqn): fqn for fqn in blocks}
    every = model.named_modules(remove_duplicate=False)
    found = ((fqn, names[module]) for fqn, module in every if module in names)
    return {fqn: block for fqn, block in found if fqn != block}


def places_outside(
    plan: ParallelPlan, model: nn.Module, seen: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return how many blocks are called before each call of outermost modules outside of them.

    Arguments are those of :func:`stage_map`.
    """
    blocks, names = called_blocks(plan, model), names_of_calls(plan, model)
    behind = {fqn: (count,) for fqn, count in _blocks_before(model, blocks).items()}
    behind |= {fqn: at for fqn, at in (seen or {}).items() if fqn in behind}
    pipeline, held = plan.pipeline_parallel, held_around(model, blocks)
    _move(behind, pipeline.head_modules, [0], "pipeline_parallel.head_modules")
    _move(behind, pipeline.tail_modules, [len(blocks)], "pipeline_parallel.tail_modules")
    for fqn, at in pipeline.called_behind.items():
        counts = _counts(fqn, at, names, model)
        if fqn not in held and not is_part(fqn, blocks):
            _move(behind, [fqn], counts, _BEHIND)
    return behind


def _counts(
    fqn: str, at: Sequence[str], names: Sequence[str], model: nn.Module
) -> tuple[int, ...]:
    """Return behind how many blocks a module is called, given those behind which it is."""
    unknown = [block for block in at if block and block not in names]
    if unknown:
        raise ValueError(
            f"{_BEHIND}: {unknown[0]!r}, behind which {fqn!r} is called, is no block of "
            f"{type(model).__name__}; blocks are {names[0]!r} to {names[-1]!r}, and '' is "
            "before all of them"
        )
    return (*sorted({names.index(block) + 1 if block else 0 for block in at}),)


def _move(
    behind: dict[str, tuple[int, ...]], fqns: Sequence[str], counts: Sequence[int], key: str
) -> None:
    """Have modules outside the blocks be called behind so many of them, as a plan's key says."""
    unknown = [fqn for fqn in fqns if fqn not in behind]
    if unknown:
        raise ValueError(
            f"{key}: {unknown[0]!r} is no module with parameters "
            f"outside the blocks; those are {sorted(behind)}"
        )
    behind |= dict.fromkeys(fqns, (*counts,))


def modules_outside_blocks(
    model: nn.Module, blocks: Sequence[str] | None = None
) -> dict[str, _Where]:
    """Return every outermost module with parameters outside the pipeline's blocks that is called.

    ``blocks`` are those; None: those of the lists of the model.

    Returns:
        Its FQN, to whether it is defined before or after the blocks. Most models call their
        modules in the order of definition; ``pipeline_parallel.head_modules`` and
        ``tail_modules`` are for others.
    """
    before = _blocks_before(model, pipeline_blocks(model) if blocks is None else blocks)
    return {fqn: "after" if count else "before" for fqn, count in before.items()}


def _blocks_before(model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Return every outermost module with parameters outside the blocks: how many are before it.

    That is by definition: the blocks that are defined before it, and all before those.
    """
    places = {model.get_submodule(fqn): index for index, fqn in enumerate(blocks)}
    found: dict[str, int] = {}
    reached = 0

    def visit(module: nn.Module, prefix: str) -> None:
        nonlocal reached
        for name, child in module.named_children():
            fqn = prefix + name
            if child in places:
                reached = max(reached, places[child] + 1)
            elif not is_called(child) or any(block.startswith(f"{fqn}.") for block in blocks):
                visit(child, f"{fqn}.")
            elif any(True for _ in child.parameters()):
                found[fqn] = reached

    visit(model, "")
    return found
