"""Products of activations with each other, by which attention that is written out is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_parallel._torch_private import pytree

_FEWEST = 3  # dims of activations: (batch, sequence, features), or (batch, heads, ..)
_PRODUCTS = {
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm,
    Tensor.baddbmm, torch.einsum, F.multi_head_attention_forward,
}  # fmt: skip


class ProductMode(TorchFunctionMode):
    """Tells of products of two activations.

    Args:
        parameters: Their identities; a product with one of them, or a view of it, is no such one.
        note: Is called before each, with the activations.
    """

    def __init__(self, parameters: Set[int], note: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._parameters, self._note = parameters, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            given = [x for x in pytree.tree_leaves((args, kwargs or {})) if self._is_activation(x)]
            if len(given) > 1:
                self._note(given)
        return func(*args, **(kwargs or {}))

    def _is_activation(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or x.ndim < _FEWEST or not x.is_floating_point():
            return False
        return not ({id(x), id(x._base)} & self._parameters)
