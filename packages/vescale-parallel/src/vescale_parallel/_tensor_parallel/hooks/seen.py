"""Whole activations that a hook is given, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vescale_parallel._model.structures import flattened
from vescale_parallel._torch_private import pytree

from .axis import Conversion


class Seen:
    """Whole activations that a hook is given, and what becomes of them.

    Args:
        leaves: What ranks have of a structure.
        whole: These, converted.
        spec: Of the structure.
        conversions: Of every leaf, those that make it whole, one behind the other.
        who: The hook, for errors.

    Attributes:
        tree: The structure with whole leaves.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        whole: Sequence[Any],
        spec: Any,
        conversions: Sequence[Sequence[Conversion]],
        who: str,
    ) -> None:
        self._parts, self._conversions, self._who = leaves, conversions, who
        self._whole = whole
        self._before = [_state(x) for x in self._whole]
        self._num_hooks = [_num_hooks(x) for x in self._whole]
        self.tree = pytree.tree_unflatten(list(self._whole), spec)

    @property
    def is_touched(self) -> bool:
        """Whether the hook wrote to one, or wants its gradient."""
        return any(map(self._is_touched, range(len(self._whole))))

    def taken(self, tree: Any) -> Any:
        """Return a structure that a hook returned, with this rank's parts.

        Raises:
            ValueError: If it has other leaves than what the hook was given.
        """
        leaves, spec = flattened(tree)
        if len(leaves) != len(self._whole):
            raise ValueError(
                f"{self._who} returns {len(leaves)} values for {len(self._whole)}, some of which "
                "several ranks have together; return as many as it is given"
            )
        parts = [self._taken(x, at) for at, x in enumerate(leaves)]
        return pytree.tree_unflatten(parts, spec)

    def write_back(self) -> None:
        """Write what a hook wrote into arguments into this rank's parts.

        Raises:
            ValueError: If it wants the gradient of one: others read the same parts.
        """
        for at, whole in enumerate(self._whole):
            if not self._conversions[at]:
                continue
            if self._is_hooked(at):
                raise ValueError(
                    f"{self._who} has put a hook on what the module is given, or has its "
                    "gradient kept, and several ranks have that together; do so with what is "
                    "returned by the module that computed it"
                )
            if _state(whole) != self._before[at]:
                self._parts[at].copy_(self._from_whole(whole, at))

    def _taken(self, x: Any, at: int) -> Any:
        whole = self._whole[at]
        if not self._conversions[at] or not isinstance(x, Tensor):
            return x
        if x is whole and not self._is_touched(at):
            return self._parts[at]
        if x.shape != whole.shape:
            raise ValueError(
                f"{self._who} returns shape {tuple(x.shape)} for {tuple(whole.shape)}, which "
                "several ranks have together; return the shape that it is given"
            )
        return self._from_whole(x, at)

    def _from_whole(self, whole: Tensor, at: int) -> Tensor:
        for conversion in reversed(self._conversions[at]):
            whole = conversion.from_whole(whole)
        return whole

    def _is_touched(self, at: int) -> bool:
        x = self._whole[at]
        is_converted = bool(self._conversions[at])
        return is_converted and (_state(x) != self._before[at] or self._is_hooked(at))

    def _is_hooked(self, at: int) -> bool:
        x = self._whole[at]
        return isinstance(x, Tensor) and (x.retains_grad or _num_hooks(x) > self._num_hooks[at])


def _state(x: Any) -> object:
    """Return what tells whether somebody wrote to a tensor; inference tensors do not say it."""
    if not isinstance(x, Tensor):
        return None
    return object() if x.is_inference() else (x._version, x.requires_grad)


def _num_hooks(x: Any) -> int:
    return len(x._backward_hooks or ()) if isinstance(x, Tensor) else 0
