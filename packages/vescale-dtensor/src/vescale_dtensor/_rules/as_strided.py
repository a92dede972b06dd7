"""Views by strides, which count elements of a storage: that of one device, which no rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._comm.emulation import offset_of
from vescale_dtensor._sharding.local_plan import Plan
from vescale_dtensor._sharding.op_call import OpCall, Unsupported, argument_table
from vescale_dtensor._sharding.replicate_fallback import gathered
from vescale_dtensor._tensor.dtensor import layout_of
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload
from vescale_dtensor.random import Window

aten = torch.ops.aten


def _restrided(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator on the whole tensor, if that has the elements that strides reach.

    What is gathered is the tensor and not the storage that it may be a slice of.
    """
    call, tensor = OpCall(func, args, kwargs), args[0]
    if not isinstance(tensor, DISTRIBUTED):
        return gathered(func, args, kwargs)
    made, local = layout_of(tensor), tensor._local_tensor
    offset = call.named("storage_offset")
    size, stride = call.named("size"), call.named("stride")
    start = 0 if offset is None or 0 in size else int(offset) - int(tensor.storage_offset())
    is_dense = Window(tuple(made.shape), made.stride, 0, made.dtype).is_dense
    # A rank that has the whole has the storage, too, unless it was gathered to there.
    has_storage = made.is_replicated and local.stride() == made.stride
    if has_storage:
        # Of a gathered view it is the storage of its base, which may itself be a slice.
        start += offset_of(local)
    if start < 0 or not (has_storage or (is_dense and _is_within(size, stride, start, tensor))):
        raise Unsupported(
            f"{func} with size {tuple(size)}, stride {tuple(stride)} and storage offset {offset} "
            f"is refused on {made} with strides {made.stride} at offset "
            f"{tensor.storage_offset()}: it may reach elements of the storage that the tensor "
            "does not have, and no rank has that storage; index the tensor it is a view of, or "
            "take full_tensor() first"
        )
    names = [name for name in argument_table(func) if name not in kwargs]
    given = dict(zip(names, args, strict=False)) | kwargs | {"storage_offset": start}
    return gathered(func, tuple(given[name] for name in argument_table(func) if name in given), {})


def _is_within(size: Sequence[int], stride: Sequence[int], start: int, tensor: Tensor) -> bool:
    last = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return 0 in size or 0 <= start <= last < tensor.numel()


HANDLERS: dict[OpOverload, Plan] = {
    aten.as_strided.default: _restrided,
    aten.as_strided_copy.default: _restrided,
    aten.as_strided_scatter.default: _restrided,
}
