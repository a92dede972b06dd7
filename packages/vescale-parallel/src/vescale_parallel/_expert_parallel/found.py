"""What was found of a model's experts, and on which rank each of their parameters is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .experts import Experts
from .listed import ListedExperts, rank_of


@dataclass(frozen=True)
class FoundExperts:
    """Modules whose experts ranks share out: that stack them, and that have a list of them."""

    stacked: Sequence[Experts] = ()
    listed: Sequence[ListedExperts] = ()

    @property
    def in_lists(self) -> list[str]:
        """FQNs of the experts that are modules of a list."""
        return [each.fqn_of(i) for each in self.listed for i in range(each.num_experts)]

    @property
    def drawing(self) -> str:
        """FQN of a module that draws random numbers for its experts; empty if none does."""
        lists = (each.fqn for each in self.listed if each.draws or each.experts_draw)
        return next((each.fqn for each in self.stacked if each.draws), next(lists, ""))

    def parameters(self, model: nn.Module, num_ranks: int) -> dict[str, int | None]:
        """Return the FQNs of experts' parameters, and the one rank that has each, None if all do.

        Of a stack each rank has some experts.
        """
        of_stacks: dict[str, int | None] = {
            f"{each.fqn}.{name}": None
            for each in self.stacked
            for name, _ in model.get_submodule(each.fqn).named_parameters()
        }
        return of_stacks | {
            f"{each.fqn_of(index)}.{name}": rank_of(index, each.num_experts, num_ranks)
            for each in self.listed
            for index, expert in enumerate(each.modules_of(model.get_submodule(each.fqn)))
            for name, _ in expert.named_parameters()
        }
