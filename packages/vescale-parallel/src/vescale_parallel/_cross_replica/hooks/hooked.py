"""Modules between one that keeps what hooks see and the layers that its hooks are on.

A model that puts hooks on layers deep within it, to read in forward what they returned, gets from
them what the modules on the way there ran on: where its own code needs all rows these have to.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from vescale_parallel._model.copies import is_of_module


@dataclass(frozen=True)
class Hooked:
    """A layer that has a hook of another module.

    Attributes:
        layer: Its FQN.
        keeper: The module whose hook it is.
    """

    layer: str
    keeper: str

    def between(self) -> list[str]:
        """Return what is around the layer, and not around the keeper, outermost first."""
        around = [self.layer[:end] for end, char in enumerate(self.layer) if char == "."]
        return [each for each in around if not _is_within(self.keeper, each)]

    def is_read_by(self, region: str) -> bool:
        """Whether a module's own code may read what the hook keeps, and calls the layer."""
        if region == self.keeper:
            return True
        is_aside = not _is_within(self.layer, self.keeper)
        return is_aside and all(_is_within(each, region) for each in (self.keeper, self.layer))


def hooked_modules(model: nn.Module) -> list[Hooked]:
    """Return the layers of a model on which other modules of it have put hooks of forward."""
    modules = dict(model.named_modules())
    hooks = {
        fqn: [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for fqn, module in modules.items()
    }
    return [
        Hooked(layer, keeper)
        for layer, on_it in hooks.items()
        if on_it
        for keeper, module in modules.items()
        if any(is_of_module(hook, {id(module)}) for hook in on_it)
    ]


def _is_within(fqn: str, outer: str) -> bool:
    return not outer or f"{fqn}.".startswith(f"{outer}.")
