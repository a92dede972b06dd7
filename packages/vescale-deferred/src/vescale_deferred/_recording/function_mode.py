"""Calls that deferred tensors are not asked about, or that do something else in a mode."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from vescale_deferred._tape.deferred_tensor import (
    SET_DATA,
    DeferredTensor,
    assign_data,
    is_differentiated,
)
from vescale_deferred._tape.spectral import is_spectral
from vescale_deferred._torch_private import plainly, tree_leaves

_SETTER = type(SET_DATA)


class ConstructionFunctionMode(TorchFunctionMode):
    """Looks at the calls of torch's functions in a constructor.

    ``real.data = deferred`` would leave ``real`` with a null pointer, as torch asks the class of
    ``real`` alone: lazy modules take their memory like that. And what is said in spectral.py of
    subclasses is true of all tensors while a dispatch mode is entered.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is _SETTER and func == SET_DATA and isinstance(args[1], DeferredTensor):
            return assign_data(*args)
        if is_spectral(func, args, kwargs) and not is_differentiated(args):
            leaves = tree_leaves((args, kwargs))
            if not any(isinstance(leaf, DeferredTensor) for leaf in leaves):
                with plainly():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)
