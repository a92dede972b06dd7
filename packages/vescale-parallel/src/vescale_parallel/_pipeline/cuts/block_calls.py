"""The calls of blocks that a pipeline is split between, in the order of forward.

[Note: blocks that are called more than once]
A pipeline is cut between calls. Where every block is called once, in the order of definition, a
call and its block are the same; ALBERT calls one block again and again, and a list may hold a
block in several places. A plan says then in ``pipeline_parallel.block_calls`` which block each
call is of. A stage runs calls that follow each other; the parameters of a block are those of all
stages that call it, as tied weights are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from vescale_parallel._model.blocks import is_called, numel_of, pipeline_blocks
from vescale_parallel._plan.plan import ParallelPlan

_KEY = "pipeline_parallel.block_calls"


def called_blocks(plan: ParallelPlan, model: nn.Module) -> tuple[str, ...]:
    """Return the block of every call, by the first of its names.

    Raises:
        ValueError: If the model has no blocks, or the plan names what cannot be one.
    """
    said = plan.pipeline_parallel.block_calls
    if not said:
        return pipeline_blocks(model)
    known, first = dict(model.named_modules(remove_duplicate=False)), first_names(model)
    for fqn in said:
        if fqn not in known:
            raise ValueError(f"{_KEY}: {fqn!r} is no module of {type(model).__name__}")
        if not is_called(known[fqn]) or not numel_of(known[fqn]):
            raise ValueError(
                f"{_KEY}: expected modules with parameters and a forward of their own, got "
                f"{fqn!r}, a {type(known[fqn]).__name__}"
            )
    found = tuple(first[known[fqn]] for fqn in said)
    for outer in {*found}:
        inner = next((fqn for fqn in found if fqn.startswith(f"{outer}.")), None)
        if inner is not None:
            raise ValueError(f"{_KEY}: {inner!r} is a part of {outer!r}; expected one of them")
    return found


def names_of_calls(plan: ParallelPlan, model: nn.Module) -> tuple[str, ...]:
    """Return a name for every call, as split points have it.

    That of its block as the plan says it; of a name that is said more than once the second call
    is ``name#2``.

    Example:
        >>> from dataclasses import replace
        >>> model = nn.ModuleDict({"a": nn.Linear(2, 2)})
        >>> plan = ParallelPlan()
        >>> calls = replace(plan.pipeline_parallel, block_calls=("a", "a"))
        >>> names_of_calls(replace(plan, pipeline_parallel=calls), model)
        ('a', 'a#2')
    """
    said, counts = plan.pipeline_parallel.block_calls or called_blocks(plan, model), Counter[str]()
    names: list[str] = []
    for fqn in said:
        counts[fqn] += 1
        names.append(fqn if counts[fqn] == 1 else f"{fqn}#{counts[fqn]}")
    return tuple(names)


def said_calls(model: nn.Module, calls: Sequence[str]) -> tuple[str, ...]:
    """Return calls, given by first names of blocks, as a plan says them.

    A block that has as many names as it has calls is called by each of them in turn.
    """
    first, names = first_names(model), dict[str, list[str]]()
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(first[module], []).append(fqn)
    counts, made, said = Counter(calls), Counter[str](), list[str]()
    for fqn in calls:
        in_turn = len(names[fqn]) == counts[fqn]
        said.append(names[fqn][made[fqn]] if in_turn else fqn)
        made[fqn] += 1
    return tuple(said)


def first_names(model: nn.Module) -> Mapping[nn.Module, str]:
    """Return the first name of every module."""
    return {module: fqn for fqn, module in model.named_modules()}
