"""Leave the values of a module to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from ._tape.deferred_tensor import DeferredTensor

M = TypeVar("M", bound=nn.Module)


def skip_init(module: M, *, fqns: Iterable[str] | None = None) -> M:
    """Have deferred tensors made without their values, for a checkpoint to fill.

    From here on they read as NaN, whole or in parts, and nothing is drawn for them: a tensor that
    is never filled shows in the first result instead of passing for a trained one. What a
    checkpoint does not hold keeps the values of ordinary construction: buffers that are not
    persistent, such as rotary tables, and tensors in plain attributes. So do integers and
    booleans, which have no NaN. Generators are where they were.

    Args:
        module: From :func:`deferred_init`, not materialised yet. Changed in place.
        fqns: The names in the checkpoint, if it holds only some of ``module.state_dict()``; the
            others keep the values of ordinary construction.

    Returns:
        ``module``.

    Raises:
        ValueError: If a name is not one of ``module.state_dict()``.

    Example:
        >>> from vescale_deferred import deferred_init, materialize
        >>> layer = skip_init(deferred_init(nn.Linear, 2, 2), fqns=["bias"])
        >>> materialize(layer).bias
        Parameter containing:
        tensor([nan, nan], requires_grad=True)
    """
    state = module.state_dict(keep_vars=True)
    names = list(state) if fqns is None else list(fqns)
    unknown = [name for name in names if name not in state]
    if unknown:
        raise ValueError(
            f"expected names of tensors in {type(module).__name__}.state_dict(), got "
            f"{unknown[0]!r}" + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
        )
    with torch.no_grad():
        for name in names:
            if _has_nan(state[name]):
                state[name].fill_(torch.nan)
    return module


def _has_nan(value: object) -> bool:
    """Whether a value of the state is a deferred tensor that can hold NaN."""
    return isinstance(value, DeferredTensor) and (value.is_floating_point() or value.is_complex())
