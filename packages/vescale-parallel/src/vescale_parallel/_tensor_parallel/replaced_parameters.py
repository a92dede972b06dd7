"""What a module's own forward finds in place of its parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def replaced(module: nn.Module, values: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Have a module's own forward, whatever it computes, find other values for a while."""
    held: Any = {name: module._parameters.get(name) for name in values}
    parameters: Any = module._parameters
    parameters.update(values)
    try:
        yield
    finally:
        parameters.update(held)


def add_on_first_rank(module: nn.Module, names: Sequence[str], rank: int) -> None:
    """Have forward find zeros on all ranks but the first, for parameters that are added to sums.

    What forward makes of them is summed over ranks, linearly, so that the gradient of that sum,
    which every rank gets whole, is every rank's gradient of the parameter: none is communicated.
    """
    if rank == 0:
        return
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        held = {name: module._parameters[name] for name in names}
        zeros = {n: None if p is None else _as_zeros(p) for n, p in held.items()}
        with replaced(module, zeros):
            return own(*args, **kwargs)

    module.forward = forward


def _as_zeros(parameter: Tensor) -> Tensor:
    # Zeros, whose gradient is the parameter's. A torch.autograd.Function is no part of a graph.
    return parameter - parameter.detach()
