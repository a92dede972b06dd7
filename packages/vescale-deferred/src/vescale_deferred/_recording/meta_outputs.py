"""The results of an operator without values: their geometry, from the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_deferred._tape.deferred_tensor import DeferredTensor
from vescale_deferred._tape.op_schema import OpSchema, aten
from vescale_deferred._torch_private import OpOverload, tree_leaves, tree_map
from vescale_deferred.exceptions import CannotDefer

META = torch.device("meta")
_CPU = torch.device("cpu")
# What running on the meta device raises if an operator needs values, or is not implemented there.
_NO_META = (RuntimeError, TypeError, ValueError, IndexError)

# On the meta device these return another dtype, or other strides, than on any other.
_MISSTATED = aten(
    "quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel nonzero_static "
    "max_unpool2d max_unpool3d linalg_eig _fft_r2c _fft_c2r _fft_c2c"
)

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def device_of_outputs(deferred: list[DeferredTensor], kwargs: _Kwargs) -> torch.device:
    """Return the device of an operator's results."""
    if kwargs.get("device") is None:
        # A tensor without dims follows the others.
        return max(deferred, key=Tensor.dim).device if deferred else _CPU
    device: Any = torch.device(kwargs["device"])
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def outputs_on_meta(
    op: OpSchema, func: OpOverload, args: _Args, kwargs: _Kwargs, device: torch.device
) -> Any:
    """Return the results of an operator on the meta device, None if it cannot run there."""
    if op.is_fill:  # tells its geometry without running
        return args[0].deferral.meta
    if op.name in _MISSTATED:
        return None

    def meta(leaf: Any) -> Any:
        if isinstance(leaf, DeferredTensor):
            return leaf.deferral.meta
        return leaf.to(META) if isinstance(leaf, Tensor) else leaf

    try:
        meta_args, meta_kwargs = tree_map(meta, (args, kwargs))
        if op.has_device:
            meta_kwargs = {**meta_kwargs, "device": META}
        if "pin_memory" in kwargs:
            meta_kwargs["pin_memory"] = None
        if "generator" in kwargs:
            meta_kwargs["generator"] = None
        results = func(*meta_args, **meta_kwargs)
    except _NO_META:
        return None
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    if op.is_view and any(leaf.is_conj() or leaf.is_neg() for leaf in tensors):
        raise CannotDefer(f"{op.name} returns a conjugate view, which writes would have to follow")
    is_plain = all(
        can_be_deferred(leaf) and not leaf.is_conj() and not leaf.is_neg() for leaf in tensors
    )
    if op.name == "aten::_linalg_svd" and device.type == "cpu":
        results = _vectors_of_lapack(results)
    return results if tensors and is_plain else None


def _vectors_of_lapack(results: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return singular vectors column after column; the meta device takes itself for CUDA."""
    left, values, right = results
    by_columns = torch.empty_like(right.mT, memory_format=torch.contiguous_format).mT
    return left, values, by_columns


def can_be_deferred(tensor: Tensor) -> bool:
    """Whether a tensor is a window on plain numbers."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
