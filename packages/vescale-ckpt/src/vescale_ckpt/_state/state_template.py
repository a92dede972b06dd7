"""State templates: where to read the state of an object whose tensors may not exist yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vescale_ckpt.types import SavedTensor, Stateful, StateTemplate

# What torch's own optimizers keep for each element of a parameter. Others may keep it factored.
_ELEMENTWISE = frozenset({
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq",
    "momentum_buffer", "prev", "square_avg", "step_size", "sum", "variance",
})  # fmt: skip


def template_of(
    given: Stateful,
    saved: Mapping[str, SavedTensor],
    structure: Callable[[], Any] | None = None,
) -> Mapping[str, Any]:
    """Return the nested dict of tensors to fill for ``given``.

    ``structure`` returns all that is stored of the object, with a :class:`SavedTensor` for each
    tensor; None if only a part of it is wanted, or some of it has another name here.
    """
    if isinstance(given, StateTemplate):
        return given.state_template(saved)
    if isinstance(given, torch.optim.Optimizer):
        return _optimizer_template(given, saved, structure() if structure else None)
    return given.state_dict()


def _optimizer_template(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, SavedTensor], structure: Any
) -> dict[str, Any]:
    """Return the optimizer's state, allocated as far as it does not exist yet.

    State of the shape of its parameter is sharded like the parameter; all other state is plain
    tensors on the CPU, and ``load_state_dict`` moves it to where it belongs. Lists and dicts of
    the state of a parameter have the lengths that were saved: LBFGS has a history.
    What is larger than a matrix of all elements is no state, whatever the checkpoint says. What
    torch's optimizers keep for each element has the shape of the parameter, whatever was saved:
    that of another parameter does not fit then.
    """
    current = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    template = _Template(
        max(1, sum(p.numel() for p in parameters)) ** 2,
        elementwise=_ELEMENTWISE if is_torchs else frozenset(),
    )
    state: dict[Any, Any] = {index: dict(item) for index, item in current["state"].items()}
    stored = structure.get("state") if isinstance(structure, Mapping) else None
    if isinstance(stored, Mapping):
        if _group_lengths(structure) == _group_lengths(current):
            # What had no state when it was saved, frozen or not used yet, has none again.
            known = {_index(number, parameters) for number in stored}
            state = {key: own for key, own in state.items() if key in known or type(key) is str}
        for number, items in stored.items():
            if isinstance(items, Mapping) and (place := _index(number, parameters)) is not None:
                own = state.setdefault(place, {})
                if items.keys() < own.keys():  # some of it came later, as LBFGS's ``al``
                    own = state[place] = {name: own[name] for name in items}
                for name, item in items.items():
                    own[name] = template.of(name, item, own.get(name), parameters[place])
        return {**current, "state": state}
    for path, tensor in saved.items():
        match path.split(".", 2):
            case ["state", number, name] if (place := _index(number, parameters)) is not None:
                own = state.setdefault(place, {})
                own[name] = template.of(name, tensor, own.get(name), parameters[place])
            case _:
                pass
    return {**current, "state": state}


def _group_lengths(state: Mapping[str, Any]) -> list[int] | None:
    """Return how many parameters each group in the state of an optimizer has."""
    groups: Any = state.get("param_groups")
    try:
        return [len(group["params"]) for group in groups]
    except (TypeError, KeyError):  # it may be anything in a checkpoint
        return None


def _index(number: Any, parameters: Sequence[torch.Tensor]) -> int | None:
    """Return which parameter a key of the state stands for."""
    text = str(number)
    if not text.isdecimal() or len(text) > 9 or int(text) >= len(parameters):
        return None
    return int(text)


class _Template:
    """Makes places for what is stored of the state of a parameter."""

    def __init__(self, max_numel: int, *, elementwise: frozenset[str]) -> None:
        self._max_numel = max_numel
        self._elementwise = elementwise

    def of(self, name: str, stored: Any, current: Any, parameter: torch.Tensor) -> Any:
        """Return what to fill of the state ``name``: what exists, or something like ``stored``."""
        if (
            isinstance(stored, SavedTensor)
            and name in self._elementwise
            and not isinstance(current, torch.Tensor)
            and stored.shape != tuple(parameter.shape)
        ):
            return torch.empty_like(parameter.detach(), dtype=stored.dtype)
        return self.like(stored, current, parameter)

    def like(self, stored: Any, current: Any, parameter: torch.Tensor) -> Any:
        """Return something of the structure of ``stored``, with the tensors that exist already."""
        if isinstance(stored, SavedTensor):
            if isinstance(current, torch.Tensor) or math.prod(stored.shape) > self._max_numel:
                return current
            return _allocate(stored, parameter)
        if isinstance(stored, Mapping):
            own: Mapping[Any, Any] = current if isinstance(current, Mapping) else {}
            merged = dict(own)
            for key, item in stored.items():
                merged[key] = self.like(item, own.get(key), parameter)
            return merged
        if isinstance(stored, list | tuple):
            held = list(current) if isinstance(current, list | tuple) else []
            held += [None] * (len(stored) - len(held))
            items = [
                self.like(item, own, parameter) for item, own in zip(stored, held, strict=False)
            ]
            return tuple(items) if isinstance(stored, tuple) else items
        return stored


def _allocate(saved: SavedTensor, parameter: torch.Tensor) -> torch.Tensor:
    if saved.shape == tuple(parameter.shape) and parameter.dim():
        return torch.empty_like(parameter.detach(), dtype=saved.dtype)
    return torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
