"""Parameters that are several matrices side by side, which are updated one by one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """What a parameter consists of.

    Attributes:
        count: How many matrices.
        dim: Along which they are beside each other.
    """

    count: int
    dim: int

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Return the matrices, which share the memory of the whole."""
        if whole.dim() > 2 and whole.shape[self.dim] == self.count:
            return whole.unbind(self.dim)
        return whole.chunk(self.count, self.dim)

    def check(self, fqn: str, shape: tuple[int, ...]) -> None:
        """Raise if a parameter of a shape cannot consist of them."""
        is_dim = -len(shape) <= self.dim < len(shape)
        if not is_dim or self.count < 1 or shape[self.dim] % self.count:
            raise ValueError(
                f"expected count=... to divide dim {self.dim} of {fqn!r}, of shape {shape}, into "
                f"equal matrices, got {self.count}; pad the parameter, or name others"
            )


_declared: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, Matrices]]] = (
    weakref.WeakKeyDictionary()
)


def declare_matrices(model: nn.Module, name: str, *, count: int, dim: int = 0) -> None:
    """Say that parameters are several matrices side by side, those of attention heads for example.

    An optimizer that updates whole parameters (Muon, or one declared with
    ``updates="parameters"``) then updates each matrix as if it were a parameter. Call it before
    ``parallelize``, or in ``optimizer_fn``. Others update as they did.

    Args:
        model: The model, whose names are looked at.
        name: Of parameters, ``"*"`` for any part of it: ``"*.q_proj.weight"``.
        count: How many matrices each consists of.
        dim: Along which they are beside each other: 0 for what makes heads of features, 1 for the
            projection of heads that comes after attention. A dim of more than two that is as long
            as ``count`` is left out of the matrices.

    Raises:
        ValueError: If no parameter has such a name, or ``count`` does not divide its ``dim``.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "o_proj": nn.Linear(8, 8)})
        >>> declare_matrices(model, "q_proj.weight", count=4)
        >>> declare_matrices(model, "o_proj.weight", count=4, dim=1)
    """
    matrices = Matrices(count=count, dim=dim)
    found = [(fqn, p) for fqn, p in model.named_parameters() if fnmatchcase(fqn, name)]
    if not found:
        raise ValueError(
            f"expected the name of a parameter of {type(model).__name__}, such as "
            f"{next((fqn for fqn, _ in model.named_parameters()), None)!r}, got {name!r}"
        )
    for fqn, parameter in found:
        matrices.check(fqn, tuple(parameter.shape))
    _declared.setdefault(model, []).append((name, matrices))


def matrices_of(model: nn.Module, names: Mapping[nn.Parameter, str]) -> dict[Any, Matrices]:
    """Return the parameters of a model that are several matrices; what was said last counts."""
    declared = _declared.get(model, [])
    return {
        parameter: matrices
        for parameter, fqn in names.items()
        for name, matrices in declared
        if fnmatchcase(fqn, name)
    }
