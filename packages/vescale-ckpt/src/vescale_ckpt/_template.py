"""Where to read the state of an object whose tensors may not exist yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ._tree import Stateful


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


def template_of(given: Stateful, saved: Mapping[str, SavedTensor]) -> Mapping[str, Any]:
    """Return the nested dict of tensors to fill for ``given``."""
    if isinstance(given, StateTemplate):
        return given.state_template(saved)
    if isinstance(given, torch.optim.Optimizer):
        return _optimizer_template(given, saved)
    return given.state_dict()


def _optimizer_template(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, SavedTensor]
) -> dict[str, Any]:
    """Return the optimizer's state, allocated as far as it does not exist yet.

    State of the shape of its parameter is sharded like the parameter; all other state is plain
    tensors on the CPU, and ``load_state_dict`` moves it to where it belongs.
    What is larger than a matrix of the parameter's elements is no state of it, whatever the
    checkpoint says.
    """
    current = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[Any, Any] = {index: dict(item) for index, item in current["state"].items()}
    for path, tensor in saved.items():
        match path.split(".", 2):
            case ["state", number, name] if _is_state(number, tensor, parameters):
                state.setdefault(int(number), {}).setdefault(
                    name, _allocate(tensor, parameters[int(number)])
                )
            case _:
                pass
    return {**current, "state": state}


def _is_state(number: str, saved: SavedTensor, parameters: Sequence[torch.Tensor]) -> bool:
    if not number.isdecimal() or len(number) > 9 or int(number) >= len(parameters):
        return False
    return math.prod(saved.shape) <= max(parameters[int(number)].numel(), 1) ** 2


def _allocate(saved: SavedTensor, parameter: torch.Tensor) -> torch.Tensor:
    if saved.shape == tuple(parameter.shape) and parameter.dim():
        return torch.empty_like(parameter.detach(), dtype=saved.dtype)
    return torch.empty(saved.shape, dtype=saved.dtype)
