"""Inputs of a call in the dtype of compute, as mixed precision elsewhere has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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


_NAMED_BUFFERS = 3


def explain_dtypes(error: RuntimeError, model: nn.Module, dtype: torch.dtype | None) -> None:
    """Say of torch's error about operands of two dtypes what is not cast to that of compute."""
    if dtype is None or not any(word in str(error) for word in ("dtype", "scalar type")):
        return
    others = [
        f"{name!r} of {str(buffer.dtype).removeprefix('torch.')}"
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.dtype != dtype
    ][:_NAMED_BUFFERS]
    named = f" ({', '.join(others)})" if others else ""
    name = str(dtype).removeprefix("torch.")
    error.add_note(
        f"precision.param {name} casts parameters and inputs. Buffers{named} and tensors that "
        "forward makes keep their dtype: cast them where they meet activations "
        f"(self.table.to(x.dtype)); or have all of the model in {name} by model.to(torch.{name}) "
        "before parallelize, and leave precision.param out"
    )
