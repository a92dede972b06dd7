"""Sums over ranks that a fused kernel would leave out.

A row-wise layer sums over ranks as it is called. Code that gives the layer's weight to a function
of its own, as modules do that have a fused kernel for some machines, does not call it: the module
would return this rank's part of a sum. Which way code goes may depend on the device, the mode or
what is installed, so a plan that was proven elsewhere says nothing of it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from vescale_parallel._model.code import names_of_class


def refuse_bypass(
    owner: nn.Module, fqn: str, entered: Collection[str], summed: Collection[str]
) -> None:
    """Have a module raise that calls a column-wise layer and not the row-wise one behind it.

    Nothing is added where the code of the module reads no weights.

    Args:
        owner: The module.
        fqn: Its name.
        entered: Names of its column-wise layers.
        summed: Those of its row-wise layers.
    """
    read = names_of_class(type(owner))
    summed = [name for name in summed if name in read]
    if "weight" not in read or not entered or not summed:
        return
    calls = Counter[str]()
    for name in (*entered, *summed):
        _count(owner.get_submodule(name), name, calls)

    def check(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        left_out = [name for name in summed if not calls[name]]
        has_entered = any(calls[name] for name in entered)
        calls.clear()
        if has_entered and left_out:
            raise RuntimeError(
                f"{fqn!r} did not call {left_out[0]!r}, whose output is summed over "
                "tensor-parallel ranks: it gave the layer's weight to a function of its own, a "
                "fused kernel for example, which knows of no ranks. Have it compute without the "
                "kernel, or leave it out of tensor_parallel.sharding_plan"
            )

    owner.register_forward_hook(check)


def _count(layer: nn.Module, name: str, calls: Counter[str]) -> None:
    # Around forward and not in hooks, which a call of forward leaves out.
    own = layer.forward

    @functools.wraps(own)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            calls[name] += 1
        return own(*args, **kwargs)

    layer.forward = counted
