"""Which parameters are of experts and who is called with tokens, told before a plan is chosen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from .experts import num_stacked
from .find_listed import find_listed
from .listed import ListedExperts


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """A module that stacks experts, or has a list of them.

    Attributes:
        fqn: Its name.
        num_experts: How many.
        parameters: FQNs of the experts' parameters.
        called: FQNs of what is called with tokens: the module, with rows, the experts of each and
            their weights, or each expert of a list, with its rows.
        is_listed: Whether experts are modules of a list, which ranks may have in numbers that
            differ by one.
    """

    fqn: str
    num_experts: int
    parameters: tuple[str, ...]
    called: tuple[str, ...]
    is_listed: bool


def expert_layers(model: nn.Module, blocks: Collection[str] = ()) -> tuple[ExpertLayer, ...]:
    """Return the layers with experts that ranks may share out, in the order of the modules.

    Stacks are told by their shapes and their forward's arguments, and are proven by
    ``planned_experts`` once there is a plan; lists are proven here.

    Args:
        model: Only names, shapes and code are read, but of what has a list that may be one.
        blocks: What runs one after the other, and so is no list of experts without a router.
    """
    stacked = {
        fqn: ExpertLayer(
            fqn=fqn,
            num_experts=count,
            parameters=tuple(f"{fqn}.{name}" for name, _ in module.named_parameters()),
            called=(fqn,),
            is_listed=False,
        )
        for fqn, module in model.named_modules()
        if (count := num_stacked(module))
    }
    listed = {each.fqn: _listed_layer(model, each) for each in find_listed(model, blocks)[0]}
    found = {**stacked, **listed}
    return tuple(found[fqn] for fqn, _ in model.named_modules() if fqn in found)


def _listed_layer(model: nn.Module, listed: ListedExperts) -> ExpertLayer:
    experts = listed.modules_of(model.get_submodule(listed.fqn))
    names = [listed.fqn_of(index) for index in range(listed.num_experts)]
    return ExpertLayer(
        fqn=listed.fqn,
        num_experts=listed.num_experts,
        parameters=tuple(
            f"{fqn}.{name}"
            for fqn, expert in zip(names, experts, strict=True)
            for name, _ in expert.named_parameters()
        ),
        called=tuple(names),
        is_listed=True,
    )
