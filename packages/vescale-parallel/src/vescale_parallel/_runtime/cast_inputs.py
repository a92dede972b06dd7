"""Inputs of a call in the dtype of compute, as mixed precision elsewhere has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._torch_private import pytree


def with_cast_inputs(forward: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return a call whose floating-point inputs have a dtype; None to leave them.

    Only what the call computes with is cast: what is looked at before, which rows there are and
    whether ranks have the same inputs, are the tensors of the caller.
    """
    if dtype is None:
        return forward

    def cast(leaf: Any) -> Any:
        is_other = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype
        return leaf.to(dtype) if is_other else leaf

    def on_cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(cast, (args, kwargs))
        return forward(*args, **kwargs)

    return on_cast
