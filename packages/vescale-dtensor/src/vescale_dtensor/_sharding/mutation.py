"""Operators that change what a tensor is: its shape, its strides, its elements.

What it changes to is another distributed tensor, which the changed one becomes. Python keeps
the object, so everyone who holds it sees the change, as on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor._comm.emulation import as_it_is
from vescale_dtensor._tensor.dtensor import DTensor, layout_of
from vescale_dtensor._torch_private import no_dispatch

from .local_plan import returned_names, whole
from .op_call import OpCall

aten = torch.ops.aten


def become(tensor: DTensor, other: DTensor) -> None:
    """Give ``tensor`` the shape, strides, placements and elements of ``other``."""
    with no_dispatch():
        aten.set_.source_Tensor(tensor, other)
    tensor._spec, tensor._local_tensor = other._spec, other._local_tensor
    tensor._sum = None


def resizes(call: OpCall) -> bool:
    """Whether the operator may give other shapes to tensors that it writes."""
    if not call.written:
        return False
    if call.func is aten.addbmm_.default:  # torch broadcasts, here only
        batch1, batch2 = call.layouts[1], call.layouts[2]
        return tuple(call.layouts[0].shape) != (batch1.shape[1], batch2.shape[2])
    if isinstance(call.kwargs.get("out"), list | tuple):  # of which the schema returns nothing
        return True
    try:
        results = call.result
    except NotImplementedError:
        return True
    except RuntimeError:  # it will not run either
        return False
    results = results if isinstance(results, tuple | list) else (results,)
    for name, result in zip(returned_names(call.func), results, strict=False):
        index = None if name is None else call.tensor_index(name)
        if index is not None and result.shape != call.layouts[index].shape:
            return True
    return False


def follow_shape(tensor: Tensor, local: Tensor) -> bool:
    """Let ``tensor`` become what an operator made of its whole local part by resizing it.

    Whether that has another shape than the tensor had is returned.
    """
    local = as_it_is(local)
    if not isinstance(tensor, DTensor) or local.shape == layout_of(tensor).shape:
        return False
    become(tensor, whole(local, tensor.device_mesh))
    return True
