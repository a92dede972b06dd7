"""What a state may hold beside tensors and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Stateful(Protocol):
    """Anything that hands out its state as a dict and takes it back: modules, optimizers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """What a checkpoint knows about a tensor before it is read.

    Attributes:
        shape: Its global shape.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class StateTemplate(Protocol):
    """An object that can allocate the tensors that its saved state will be read into.

    An optimizer that has not made a step yet has no state to read into. This method lets it
    allocate the state, sharded as it wants.
    """

    def state_template(self, saved: Mapping[str, SavedTensor]) -> Mapping[str, Any]:
        """Return a nested dict of the shape of ``state_dict()``, with tensors to fill.

        Args:
            saved: The tensors in the checkpoint, by their dotted path within this object.

        Returns:
            Tensors and DTensors are filled in place; other leaves are replaced by the stored
            values. The result goes to ``load_state_dict()``.
        """
        ...


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value of a state of which every rank has its own, such as the state of a generator.

    It is saved for every rank, and loaded on the rank of the same number. If the number of ranks
    has changed, it is an error, unless all ranks had the same value: then every rank gets that.
    ``load(strict=False)`` leaves the value as it is instead.

    Attributes:
        value: Anything that a state may contain but DTensors: tensors of the same shape and
            dtype on every rank, Python values, objects with ``state_dict()``.
        strict: Whether that is an error; if not, the value stays as it is, with a warning.
    """

    value: Any
    strict: bool = True
