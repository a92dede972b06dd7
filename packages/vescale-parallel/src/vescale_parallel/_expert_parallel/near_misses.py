"""Why modules that look like experts are none that ranks can share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence

from torch import nn

from .experts import has_router, num_alike, structure, takes_rows

_NAMED = re.compile("expert|moe|mixture|ffn", re.IGNORECASE)


def near_misses(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the FQNs of what looks like experts, and what is in the way."""
    yield from _stacks(model)
    yield from _parameter_lists(model)
    yield from _children(model)
    yield from _lists(model)


def _stacks(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield modules with stacks of matrices beside a router.

    A router is a parameter with a dim of as many, of the module or of the one that has it.
    """
    for fqn, module in model.named_modules():
        stacked = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() > 2}
        if not stacked or type(module).__module__.startswith("torch."):
            continue
        count = next(iter(stacked.values())).shape[0]
        owner = model.get_submodule(fqn.rpartition(".")[0])
        routers = [
            p for p in owner.parameters() if not any(p is each for each in stacked.values())
        ]
        if count < 2 or not any(count in p.shape for p in routers):
            continue
        if not num_alike(module):
            others = [name for name, _ in module.named_parameters() if name not in stacked]
            named = ", ".join(map(repr, others or stacked))
            why = f"not all of its parameters are stacks of {count} ({named})"
            yield fqn, f"stacks matrices, but {why}"
        elif not takes_rows(module):
            taken = ", ".join(inspect.signature(module.forward).parameters)
            yield fqn, f"stacks matrices, but its forward takes ({taken})"


def _parameter_lists(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield lists of matrices, one of each expert."""
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ParameterList | nn.ParameterDict):
            continue
        shapes = [p.shape for p in module.parameters()]
        owner = model.get_submodule(fqn.rpartition(".")[0])
        alike = len(shapes) > 1 and len({*shapes}) == 1
        if alike and has_router(owner, [module], len(shapes)):
            said = (
                f"is a list of {len(shapes)} parameters of one shape beside a router: make a "
                "module of each expert, in an nn.ModuleList, or one parameter that stacks them"
            )
            yield fqn, said


def _children(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield modules that have experts as attributes: ``expert_0``, ``expert_1``."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        kinds: dict[object, list[str]] = {}
        for name, child in module.named_children():
            stem = re.sub(r"\d+", "*", name)
            if stem != name and any(True for _ in child.parameters()):
                kinds.setdefault((stem, structure(child)), []).append(name)
        for names in kinds.values():
            if len(names) > 1 and has_router(module, map(module.get_submodule, names)):
                said = (
                    f"has {len(names)} modules of one structure as attributes ({names[0]!r} to "
                    f"{names[-1]!r}) beside a router: keep them in an nn.ModuleList or "
                    "nn.ModuleDict"
                )
                yield fqn, said


def _lists(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield lists of experts that differ."""
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or not _NAMED.search(fqn):
            continue
        owner, children = model.get_submodule(fqn.rpartition(".")[0]), [*module.children()]
        differ = len({structure(child) for child in children}) > 1
        if differ and has_router(owner, children):
            yield fqn, f"is a list beside a router, but {_difference(children)}"


def _difference(children: Sequence[nn.Module]) -> str:
    first = structure(children[0])
    other = next(each for each in children if structure(each) != first)
    if type(other) is not type(children[0]):
        return f"its modules are of {type(children[0]).__name__} and {type(other).__name__}"
    shapes = [[tuple(p.shape) for p in each.parameters()] for each in (children[0], other)]
    return f"its modules have parameters of other shapes ({shapes[0]} and {shapes[1]})"
