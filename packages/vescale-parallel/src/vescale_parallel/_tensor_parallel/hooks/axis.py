"""What gives hooks whole activations along an axis of a mesh, on one rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

# What a hook is given: arguments before they enter a region, as forward gets them, what a module
# returns, and the gradients of these as full backward hooks see them.
Slot = Literal["before", "given", "returned", "grad_input", "grad_output"]


@dataclass(frozen=True)
class HookedCall:
    """A call of a model that has hooks.

    Attributes:
        model: As it is now.
        args: Of the call.
        kwargs: Of the call.
        fqns: Modules with hooks.
        backward: Those with hooks of backward.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fqns: frozenset[str]
    backward: frozenset[str]


class Conversion(Protocol):
    """How a tensor becomes that of all ranks of an axis, and becomes this rank's again."""

    def to_whole(self, x: Tensor) -> Tensor:
        """Return what one device has; every rank must call this."""
        ...

    def from_whole(self, whole: Tensor) -> Tensor:
        """Return what this rank has."""
        ...


class Unknown:
    """Stands for the conversion of a leaf that lies over ranks in a way that was not found."""


class Axis(Protocol):
    """Knows how what hooks are given lies over the ranks of an axis."""

    def learn(self, call: HookedCall) -> None:
        """Find it for a call."""
        ...

    def sends(self, fqn: str, slots: Collection[Slot]) -> bool:
        """Whether hooks of a module are given what several ranks have."""
        ...

    def conversions(
        self, fqn: str, slot: Slot, leaves: Sequence[Any]
    ) -> list[Conversion | Unknown | None]:
        """Return those of leaves, None of what is whole."""
        ...


def is_plain(x: Any) -> bool:
    """Whether something is a tensor that ranks may have parts of: others say so themselves."""
    return type(x) in (Tensor, nn.Parameter)
