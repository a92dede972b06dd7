"""The ways in which a region may be put around layers that are sharded together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.tensor import Shard

from vescale_dtensor import InterleavedShard
from vescale_parallel._model.fqns import generalize, matching
from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.sharding_spec import num_parts_of

from .candidate import Group


def border_options(model: nn.Module, group: Group) -> Iterator[dict[str, str]]:
    """Yield marks of a region's collectives: around its layers, then around what holds them.

    Last around layers that get weights of their own, as experts get those of a router: what holds
    them may be another module in other blocks.
    """
    plain = [p for p in (*group.entries, *group.exits) if not is_linear(model, p)]
    yield {
        **{f"{p}.<enter>": "Replicate()" for p in group.entries if p in plain},
        **{f"{p}.<leave>": "Replicate()" for p in group.exits if p in plain},
    }
    leaves = {f"{p}.<leave>": "Replicate()" for p in group.exits if p in plain}
    for entrance in entrances(model, holder_of(group.entries), "Replicate()"):
        yield entrance | leaves
    weighed = {
        mark: "Replicate()" for p in group.entries if p in plain for mark in _weights(model, p)
    }
    if weighed:
        yield (
            {f"{p}.<enter>": "Replicate()" for p in group.entries if p in plain} | weighed | leaves
        )


def _weights(model: nn.Module, pattern: str) -> list[str]:
    """Return the marks of weights that enter a module beside its first activation."""
    names = matching(pattern, [fqn for fqn, _ in model.named_modules()])
    arguments = list(inspect.signature(model.get_submodule(names[0]).forward).parameters)
    return [f"{pattern}.<enter:{name}>" for name in arguments[1:] if name.endswith("weights")]


def is_linear(model: nn.Module, pattern: str) -> bool:
    modules = matching(pattern, [fqn for fqn, _ in model.named_modules()])
    return bool(modules) and linear_kind(model.get_submodule(modules[0])) is not None


def holder_of(patterns: Sequence[str]) -> str:
    """Return the deepest module that holds all of some modules, empty if it is the block."""
    split = [pattern.split(".") for pattern in patterns]
    common = [parts[0] for parts in zip(*split, strict=False) if len(set(parts)) == 1]
    if len(patterns) == 1:
        common = common[:-1]
    return "" if not common or common[-1] == "*" else ".".join(common)


def entrances(model: nn.Module, holder: str, arrives: str) -> Iterator[dict[str, str]]:
    """Yield the marks of what enters a module: the first activation, then others, too."""
    names = matching(holder, [fqn for fqn, _ in model.named_modules()]) if holder else []
    if not names:
        return
    first = {f"{holder}.<enter>": arrives}
    yield first
    arguments = list(inspect.signature(model.get_submodule(names[0]).forward).parameters)
    # What comes from outside the block is whole, whatever runs through the blocks.
    others = [n for n in arguments[1:] if n.endswith("states") or n in ("key", "value")]
    if others:
        yield first | {f"{holder}.<enter:{name}>": "Replicate()" for name in others}


def attribute_options(model: nn.Module, group: Group, size: int) -> list[dict[str, str]]:
    """Return sets of integers that may have to be divided, fewest first."""
    holder = holder_of((*group.entries, *group.exits))
    names = [fqn for fqn, _ in model.named_modules()]
    found = matching(holder, names) if holder else []
    if not found:
        return [{}]
    widths = _widths(model, group)
    heads: dict[str, str] = {}
    sizes: dict[str, str] = {}
    ratios: dict[str, str] = {}
    for fqn, module in model.get_submodule(found[0]).named_modules():
        if linear_kind(module) is not None:
            continue
        for name, value in vars(module).items():
            if type(value) is not int or value <= 0 or name.startswith("_"):
                continue
            mark = f"{holder}.{generalize(fqn)}".rstrip(".") + f".<attr:{name}>"
            if group.num_shared and value == group.ratio and "group" in name:
                ratios[mark] = f"Shard(0) of {size // group.num_shared}"
            elif value % size:
                continue
            elif value in widths:
                sizes[mark] = "Shard(0)"
            elif "head" in name and "dim" not in name and "size" not in name:
                heads[mark] = "Shard(0)"
    options = [{}, heads, sizes, {**heads, **sizes}]
    options = [{**ratios, **option} for option in options] + (options if ratios else [])
    return [option for index, option in enumerate(options) if option not in options[:index]]


def _widths(model: nn.Module, group: Group) -> set[int]:
    """Return the lengths that are sharded."""
    found: set[int] = set()
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, placement in group.parameters.items():
        assert isinstance(placement, Shard | InterleavedShard)
        for fqn in matching(pattern, names)[:1]:
            length = model.get_parameter(fqn).shape[placement.dim]
            found |= {length, length // num_parts_of(placement)}
    return found
