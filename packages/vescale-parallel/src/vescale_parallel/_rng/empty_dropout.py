"""Dropout of nothing: a rank that has no part of a tensor draws along with those that have.

torch returns an empty tensor as it is, before an operator is dispatched that a mode could see, and
draws nothing. But one device draws for all of a sequence, of which the last ranks may have no
position: their generators would stay behind. Nor does torch keep a mask then, and ranks that run
a block again in backward would stop behind different collectives, at the last tensor they kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Whether they draw for channels rather than for elements, and whether they do by default.
_DROPOUTS: dict[Callable[..., Tensor], tuple[bool, bool]] = {
    F.dropout: (False, True),
    F.alpha_dropout: (False, False),
    F.dropout1d: (True, True),
    F.dropout2d: (True, True),
    F.dropout3d: (True, True),
    F.feature_alpha_dropout: (True, False),
    torch.dropout: (False, True),
    torch.dropout_: (False, True),
    torch.alpha_dropout: (False, True),
    torch.alpha_dropout_: (False, True),
    torch.feature_dropout: (True, True),
    torch.feature_dropout_: (True, True),
    torch.feature_alpha_dropout: (True, True),
    torch.feature_alpha_dropout_: (True, True),
}


class DrawsForNothing(TorchFunctionMode):
    """Has functions for dropout draw for empty tensors.

    Args:
        draw: Runs an operator that draws, with its positional arguments.
    """

    def __init__(self, draw: Callable[[Any, tuple[Any, ...]], object]) -> None:
        super().__init__()
        self._draw = draw

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in _DROPOUTS:
            mask = self._mask(*_DROPOUTS[func], *args, **kwargs)
            return output if mask is None else output * mask
        return output

    def _mask(
        self,
        is_of_channels: bool,
        by_default: bool,
        /,
        input: Tensor,
        p: float = 0.5,
        *rest: Any,
        **named: Any,
    ) -> Tensor | None:
        """Draw the mask of an empty tensor; None if there is none to draw."""
        given = rest[0] if rest else named.get("training", named.get("train", by_default))
        if input.numel() or not given or p == 0:
            return None
        if is_of_channels:
            mask = input.new_empty((*input.shape[:2], *(1 for _ in input.shape[2:])))
        else:
            mask = torch.empty_like(input, requires_grad=False)
        if mask.device.type == "cpu" or is_of_channels:
            self._draw(torch.ops.aten.bernoulli_.float, (mask, 1 - p))
        else:
            self._draw(torch.ops.aten.native_dropout.default, (input.detach(), p, True))
        return mask


def has_empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of a module's arguments is an empty tensor."""
    given = (*args, *kwargs.values())
    return any(isinstance(each, Tensor) and not each.numel() for each in given)
