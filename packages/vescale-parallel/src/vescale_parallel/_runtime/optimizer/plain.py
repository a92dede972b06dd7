"""What a step of an optimizer sees in place of distributed parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor

State = defaultdict[Any, dict[str, Any]]
# A parameter, and its state on this rank.
StateOf = tuple[nn.Parameter, Mapping[str, Any]]


class Saved(Protocol):
    """A tensor as a checkpoint lists it."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        ...


class PlainParameters(Protocol):
    """Plain parameters that a step updates in place of the distributed ones.

    Attributes:
        version: Another number whenever a parameter got another plain one.
    """

    version: int

    def begin(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[list[nn.Parameter]]:
        """Return what each group has in a step now, with gradients. Every rank calls this."""
        ...

    def public_of(self, plain: Any) -> Any:
        """Return the distributed parameter of a plain one; what is none as it is."""
        ...

    def plain_of(self, public: Any) -> Any:
        """Return the plain parameter of a distributed one, None if this rank has none of it."""
        ...

    def parts_of(self, public: Any) -> Sequence[nn.Parameter] | None:
        """Return the matrices that a step has in place of the plain one; None for one matrix."""
        ...

    def part_of(self, plain: Any) -> tuple[Any, int] | None:
        """Return the distributed parameter of such a matrix, and its number there."""
        ...

    def end(self, *, is_complete: bool) -> None:
        """Bring what a step has updated to where it belongs. Every rank calls this."""
        ...

    def shown(self, state: Mapping[str, StateOf]) -> dict[str, dict[str, Any]]:
        """Return state as a checkpoint has it, by the names of parameters that have some."""
        ...

    def taken(self, public: nn.Parameter, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a parameter's state as the step wants it from what :meth:`shown` has returned."""
        ...

    def empty(self, public: nn.Parameter, saved: Mapping[str, Saved]) -> dict[str, Any]:
        """Return tensors for what a checkpoint has of a parameter's state, by dotted path."""
        ...


class PlainState:
    """The state of an optimizer by plain parameter, which a step uses.

    Its dicts are those of the state by distributed parameter, so that nothing is moved in a step.
    Of a parameter that is several matrices these are by number: ``{"0": {...}, "1": {...}}``.
    """

    def __init__(self, plain: PlainParameters) -> None:
        self._plain, self._version = plain, plain.version
        self._state: State = defaultdict(dict)

    def begin(self, public: Mapping[Any, dict[str, Any]]) -> State:
        """Return the state for a step."""
        if self._version != self._plain.version or not _is_same(public, self._state):
            self._version, self._state = self._plain.version, defaultdict(dict)
        for values in public.values():
            for name, value in values.items():
                # Made from distributed parameters in the optimizer's constructor.
                if isinstance(value, DTensor):
                    values[name] = value._local_tensor
        if len(public) != len(self._state):
            for key, values in public.items():
                parts = self._plain.parts_of(key)
                for index, part in enumerate(parts or ()):
                    self._state[part] = values.setdefault(str(index), {})
                plain = self._plain.plain_of(key)
                if parts is None and plain is not None:
                    self._state[plain] = values
        return self._state

    def end(self, public: dict[Any, dict[str, Any]], state: State) -> None:
        """Show what a step left as the state by distributed parameter, in place."""
        self._state = state
        if _is_same(public, state):
            return
        refuse_state_of_none("the optimizer", state)
        for key in list(public):
            plain, parts = self._plain.plain_of(key), self._plain.parts_of(key)
            here = (plain,) if parts is None else parts
            if plain is not None and not any(each in state for each in here):
                del public[key]
        for plain, values in state.items():
            if (part := self._plain.part_of(plain)) is not None:
                public.setdefault(part[0], {})[str(part[1])] = values
            else:
                public[self._plain.public_of(plain)] = values


def refuse_state_of_none(name: str, keys: Iterable[object]) -> None:
    """Raise if an optimizer has state under another key than a parameter, as ``state["k"]``.

    Raises:
        ValueError: With the key.
    """
    for key in keys:
        if not isinstance(key, Tensor):
            raise ValueError(
                f"{name} keeps {key!r} in its state, which is that of a parameter each: keep it "
                "in param_groups, or make the optimizer after parallelize, of model.parameters()"
            )


def _is_same(public: Mapping[Any, dict[str, Any]], plain: Mapping[Any, dict[str, Any]]) -> bool:
    # By the dicts alone: the hash of a tensor is a call of Python.
    return len(public) == len(plain) and all(map(is_, public.values(), plain.values()))


def are_same(groups: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> bool:
    """Return whether groups hold the same objects; tensors do not compare by ``==``."""
    return len(groups) == len(others) and all(
        len(group) == len(other) and all(map(is_, group, other))
        for group, other in zip(groups, others, strict=True)
    )


def local_gradient(parameter: Any) -> Tensor | None:
    """Return this rank's part of a distributed parameter's gradient, cut as the parameter is.

    Raises:
        ValueError: If it is a plain tensor.
    """
    grad: Any = parameter.grad
    if grad is None:
        return None
    if not isinstance(grad, DTensor):
        raise ValueError(
            f"expected the gradient of a parameter of shape {tuple(parameter.shape)} to be a "
            f"distributed tensor, got {type(grad).__name__}; set it by "
            "parameter.grad = vescale_dtensor.distribute_tensor(grad, "
            "parameter.device_mesh, parameter.placements)"
        )
    if grad._spec is not parameter._spec and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return grad._local_tensor


def take_assigned(plain: nn.Parameter, memory: Tensor) -> None:
    """Copy what a step has assigned to ``plain.data`` to where it was before."""
    if plain.data_ptr() != memory.data_ptr():
        with torch.no_grad():
            memory.copy_(plain)
            plain.data = memory.detach()
