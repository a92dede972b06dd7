"""Why modules that look like stacks of experts are none that ranks can share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from .experts import num_alike, takes_rows


def near_misses(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the FQNs of modules with stacks of matrices beside a router, and what is in the way.

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
            yield fqn, f"not all of its parameters are stacks of {count} ({named})"
        elif not takes_rows(module):
            taken = ", ".join(inspect.signature(module.forward).parameters)
            yield fqn, f"its forward takes ({taken})"
