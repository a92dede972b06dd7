"""The plan of a scaled-down model as that of the model itself: its names, its lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.blocks import block_stacks
from vescale_parallel._model.fqns import generalize, matching
from vescale_parallel._tensor_parallel.chunks import parts_of
from vescale_parallel._tensor_parallel.sharding_spec import parse_placement, placement_text

# What a module reads of a buffer, in parts that differ in length.
_READ = re.compile(r"(.*)\.<read:([\w.]+)>")


def plan_of_scaled_down(
    plan: Mapping[str, str], scaled: nn.Module, model: nn.Module
) -> dict[str, str]:
    """Return a plan of a scaled-down model for the model itself, which has more blocks.

    What is said of one of its last blocks is said of the model's. What is said of all blocks that
    are made of the same modules, of each by its name, is said of all such blocks of the model.
    Parts that differ in length are as many times as long as the dim that they make up.
    """
    blocks = _Blocks(scaled, model)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    shapes = {name: tensor.shape for name, tensor in named}
    return {
        name: _scaled(name, text, shapes)
        for pattern, text in plan.items()
        for name in blocks.names(pattern, plan)
    }


class _Blocks:
    """The blocks of a scaled-down model, and those of the model that they stand for."""

    def __init__(self, scaled: nn.Module, model: nn.Module) -> None:
        stacks = list(zip(block_stacks(scaled), block_stacks(model), strict=True))
        self._last = {theirs[-1]: ours[-1] for theirs, ours in stacks}
        # Of each block, those made of the same modules in one model and in the other.
        self._alike: dict[str, tuple[list[str], list[str]]] = {}
        for theirs, ours in stacks:
            small = {fqn: _modules_of(scaled, fqn) for fqn in theirs}
            large = {fqn: _modules_of(model, fqn) for fqn in ours}
            for fqn, modules in small.items():
                first, second = (
                    [each for each, others in made.items() if others == modules]
                    for made in (small, large)
                )
                self._alike[fqn] = first, second

    def names(self, pattern: str, plan: Mapping[str, str]) -> list[str]:
        """Return the model's patterns for one of a plan of its scaled-down model."""
        head, mark, tail = pattern.partition(".<")
        if head in self._last:
            return [self._last[head] + mark + tail]
        block = next((fqn for fqn in self._alike if pattern.startswith(f"{fqn}.")), None)
        if block is None:
            return [pattern]
        below, (theirs, ours) = pattern.removeprefix(block), self._alike[block]
        is_of_all = all(plan.get(each + below) == plan[pattern] for each in theirs)
        return [each + below for each in ours] if is_of_all else [pattern]


def _modules_of(model: nn.Module, block: str) -> set[tuple[str, type]]:
    modules = model.get_submodule(block).named_modules()
    return {(generalize(fqn), type(module)) for fqn, module in modules}


def _scaled(pattern: str, text: str, shapes: Mapping[str, torch.Size]) -> str:
    read = _READ.fullmatch(pattern)
    if "<" in pattern and (read is None or "InterleavedShard" not in text):
        return text
    named = matching(pattern if read is None else f"{read[1]}.{read[2]}", shapes)
    placement = parse_placement(text)
    parts = parts_of(placement)
    if not isinstance(parts, tuple) or not isinstance(placement, InterleavedShard) or not named:
        return text
    total, length = sum(parts), shapes[named[0]][placement.dim]
    if any(part * length % total for part in parts):
        return text  # which the model then does not fit
    scaled = tuple(part * length // total for part in parts)
    return placement_text(InterleavedShard(placement.dim, scaled))
