"""Losses that data-parallel ranks may average: sums of means over rows.

The mean of what parts of a batch give is what the whole gives if each part divides by the same
number of items, or if the count is that of all parts (:class:`TokenMeans`), and only additions
and multiplications by plain numbers come after. A sum, a mean over chosen items, a product or
quotient of two means is that only for some data, so it does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_ADD = {"add", "add_", "sub", "__add__", "__radd__", "__iadd__", "__sub__", "__isub__"}
_SCALE = {
    *("mul", "mul_", "div", "div_", "true_divide", "__mul__", "__rmul__", "__imul__"),
    *("__truediv__", "__itruediv__"),
}
_KEEP = {
    *("neg", "__neg__", "to", "type", "float", "double", "half", "bfloat16", "clone"),
    *("view", "reshape", "squeeze", "contiguous"),
}

# Backward nodes of means over all elements, and of losses with such a reduction.
_MEANS = ("Mean",)
_LOSSES = ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "SoftMargin")
_MEAN_REDUCTION = 1  # at::Reduction::Mean
# What these return is as long as there are elements of some value.
_OF_UNKNOWN_LENGTH = ("Index", "MaskedSelect", "Take", "Unique", "RepeatInterleave")


class MeanTracker(TorchFunctionMode):
    """Tells which scalars are sums of means over rows, while code runs.

    ``token_means`` is filled meanwhile with means that count over all parts.
    """

    def __init__(self, token_means: Sequence[Tensor]) -> None:
        super().__init__()
        self._token_means = token_means
        self._known: dict[int, Tensor] = {}  # held, so that no other tensor gets the number

    def note(self, mean: Tensor) -> Tensor:
        """Take a scalar for such a one."""
        self._known[id(mean)] = mean
        return mean

    def is_mean(self, value: object) -> bool:
        """Whether a value is such a scalar."""
        return id(value) in self._known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 0 and result.is_floating_point():
            name = getattr(func, "__name__", "")
            if self._is_new_mean(result) or self._is_linear(name, args, kwargs or {}):
                self.note(result)
        return result

    def _is_new_mean(self, result: Tensor) -> bool:
        if any(result is mean for mean in self._token_means[-1:]):
            return True
        node = result.grad_fn
        return node is not None and _is_static_mean(node, node.name())

    def _is_linear(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        if not tensors or not all(map(self.is_mean, tensors)):
            return False
        if name in _SCALE:
            return len(tensors) == 1 and tensors[0] is args[0]
        return name in _ADD or name in _KEEP


def _is_static_mean(node: Any, name: str) -> bool:
    is_loss = name.startswith(_LOSSES) and getattr(node, "_saved_reduction", 0) == _MEAN_REDUCTION
    return (name.startswith(_MEANS) or is_loss) and not _has_unknown_length(node)


def _has_unknown_length(node: Any) -> bool:
    todo, seen = [node], {node}
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is None or following in seen:
                continue
            if following.name().startswith(_OF_UNKNOWN_LENGTH):
                return True
            seen.add(following)
            todo.append(following)
    return False
