"""Writes within a region into tensors of a rank, and the gradients that they would lose."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import DTensor

_PARTS: Any = (Tensor.data.__get__, Tensor.detach)  # pyright: ignore[reportAttributeAccessIssue]: a descriptor


class Parted:
    """Plain tensors that code took off their graph, by ``.data`` or ``detach()``, to write to.

    What is written to such a one gives it a gradient, and none to the buffer whose memory it is:
    code that updates running sums means that, and does not read the tensor itself afterwards.
    """

    def __init__(self) -> None:
        # With whether a gradient was lost there.
        self._known: dict[int, tuple[weakref.ref[Tensor], bool]] = {}

    def see(self, func: Callable[..., Any], first: Tensor, made: Any) -> None:
        """Note a result that is such a tensor, or a view of one."""
        if type(made) is not Tensor or self._is_known(made):
            return
        if func in _PARTS or (self._is_known(first) and _address(made) == _address(first)):
            self._known[id(made)] = weakref.ref(made), False

    def take(self, tensor: Tensor) -> bool:
        """Whether a tensor is one; what is written to it now has no gradient."""
        if not self._is_known(tensor):
            return False
        self._known[id(tensor)] = weakref.ref(tensor), True
        return True

    def has_lost(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of some tensors would have a gradient on one device."""
        return any(self._is_known(each) and self._known[id(each)][1] for each in tensors)

    def forget(self) -> None:
        """Know none."""
        self._known.clear()

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known[0]() is tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def loss_of_gradient(func: Callable[..., Any]) -> str:
    return (
        f"{getattr(func, '__name__', func)} writes into a tensor of this rank, or reads from one, "
        "what is made of all rows of the batch, which would lose its gradient; make the tensor "
        "with x.new_zeros or torch.zeros_like, write what is detached (x.detach()), or use "
        "data_parallel.size 1"
    )


def without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach() if isinstance(tensor, DTensor) and tensor.requires_grad else tensor


def loses_gradient(tensors: Sequence[Tensor]) -> bool:
    first, *others = tensors
    if isinstance(first, DTensor) or first.requires_grad or not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in others)
