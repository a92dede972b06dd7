"""Private names of torch, in one place. Each was seen in torch 2.11 and 2.13.

Without them there is no way to record what a constructor does: torch has no public door to its
operator dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
)


@contextmanager
def plainly() -> Iterator[None]:
    """Run operators as if nothing was going on: no modes, default device, autograd or autocast."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):
        yield


def active_modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes that are entered, the outermost first."""
    return _get_current_dispatch_mode_stack()


_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def is_tracing() -> bool:
    """Whether operators run on fake tensors here, or are traced: modes of the user come first."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def without_torch_function() -> AbstractContextManager[Any]:
    """Call torch functions on a subclass without coming back to its ``__torch_function__``."""
    return torch._C.DisableTorchFunctionSubclass()


def wrapper(cls: type[Tensor], meta: Tensor, device: torch.device) -> Any:
    """Return a ``cls`` without storage that has the geometry of ``meta``."""
    tensor = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        cls,
        meta.size(),
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        layout=meta.layout,
        device=device,
    )
    # Whoever gets to its null pointer in C++, such as to_dlpack, then raises instead of crashing.
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def storage_key(tensor: Tensor) -> int:
    """Return what two tensors have in common exactly if they share a storage."""
    return tensor.untyped_storage()._cdata


def schema(func: OpOverload) -> Any:
    """Return the operator's schema: its name, and what it takes, mutates and returns."""
    return func._schema
