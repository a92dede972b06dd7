"""Operators that make a tensor a view of what it was, in place, and those that are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._sharding.gathered_views import GatheredView
from vescale_dtensor._sharding.local_plan import Plan, distributed
from vescale_dtensor._sharding.mutation import become
from vescale_dtensor._sharding.op_call import OpCall, Unsupported
from vescale_dtensor._tensor.dtensor import DTensor, layout_of, wrap
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload

aten = torch.ops.aten

_VIEW_OF: dict[OpOverload, OpOverload] = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
}


def _changed(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Let a tensor become a view of what it was.

    Other views of it count their writes together with it, and not with what stands for it as it
    was, so where the view had to be gathered it is ``tensor`` that says whether it is up to date.
    """
    tensor: DTensor = args[0]
    before = wrap(tensor._local_tensor, layout_of(tensor), offset=int(tensor.storage_offset()))
    before._alias_of = tensor._alias_of
    view = _VIEW_OF[func](before, *args[1:], **kwargs)
    become(tensor, view)
    tensor._alias_of = view._alias_of
    if isinstance(tensor._alias_of, GatheredView):
        tensor._alias_of.count_writes_of(tensor)
    return tensor


def _set(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Let a tensor share the elements of another."""
    call = OpCall(func, args, kwargs)
    tensor, source = args
    plain = not all(isinstance(each, DISTRIBUTED) for each in args)
    if plain or tensor._alias_of is not None:
        raise Unsupported(
            f"{func} is refused unless both tensors are distributed and the first one is not a "
            "view that had to be gathered: the elements could not be shared"
        )
    become(tensor, distributed(source, call))
    return tensor


def _detach(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor: autograd, the only thing that changes, is above."""
    return args[0]


HANDLERS: dict[OpOverload, Plan] = {
    **dict.fromkeys(_VIEW_OF, _changed),
    aten.set_.source_Tensor: _set,
    aten.detach_.default: _detach,
}
_STORED = dict.fromkeys(
    (
        aten.set_.default,
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor_storage_offset,
    ),
    "a storage holds one rank's elements; use the operator with a tensor",
)
_NAMES = (
    "_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc",
    "to_mkldnn", "quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel",
    "_nested_tensor_from_tensor_list", "_nested_from_padded", "_nested_tensor_from_mask",
)  # fmt: skip
# Not every version of torch has all of them.
_PACKETS = [getattr(aten, name) for name in _NAMES if hasattr(aten, name)]
REFUSED: dict[OpOverload, str] = {
    **_STORED,
    **dict.fromkeys(
        (getattr(packet, name) for packet in _PACKETS for name in packet.overloads()),
        "the elements of a sparse, quantized or nested tensor are not where placements say; "
        "take full_tensor() first",
    ),
}
