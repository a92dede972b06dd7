"""Operators without a rule: gather, compute as one device does, keep the result whole.

What such an operator writes is cut again and copied to where it was. It warns once per operator
with the bytes that were moved; inside :func:`strict` it raises instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from vescale_dtensor._caches import own_variable
from vescale_dtensor._comm.emulation import as_it_is, is_emulated, offset_of, part_of
from vescale_dtensor._layout.layout import replicated
from vescale_dtensor._redistribute.execute import redistribute_local
from vescale_dtensor._redistribute.plan import redistribution_numel
from vescale_dtensor._tensor.dtensor import DTensor, layout_of, redistributed
from vescale_dtensor._torch_private import DISTRIBUTED, OpOverload, pytree

from .gathered_views import GatheredView
from .local_plan import distributed, finisher, whole
from .mutation import follow_shape
from .op_call import OpCall, Unsupported, is_view


class GatherWarning(UserWarning):
    """An operator without a rule for these placements gathered its inputs."""


_strict = False
own_variable(__name__, "_strict")
_warned: set[OpOverload] = set()


@contextmanager
def strict() -> Iterator[None]:
    """Raise instead of gathering the inputs of operators that have no rule."""
    # A setting of the process, like grad mode.
    global _strict
    before, _strict = _strict, True
    try:
        yield
    finally:
        _strict = before


def gathered(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on whole tensors; its results are whole on every rank."""
    call = OpCall(func, args, kwargs)
    _refuse_collective(call)
    _report(call)
    moved_there = [
        redistributed(distributed(tensor, call), replicated(made.mesh))
        for tensor, made in zip(call.tensors, call.layouts, strict=True)
    ]
    # By identity: an argument that is given twice and written is one tensor for the operator.
    copies = {
        id(call.tensors[index]): _own_copy(call.tensors[index], moved_there[index])
        for index in call.written
    }
    locals_ = [
        copies.get(id(tensor), after._local_tensor)
        for tensor, after in zip(call.tensors, moved_there, strict=True)
    ]
    local_args, local_kwargs = call.with_tensors(locals_)
    result = func(*local_args, **local_kwargs)
    for index in call.written:
        _write_back(call.tensors[index], locals_[index])
    if is_view(func):
        return _views(call, moved_there[0] is call.tensors[0], result)
    return finisher(func, call.mesh)(args, kwargs, result)


def _refuse_collective(call: OpCall) -> None:
    """Raise for torch.distributed's own collectives, which would be of what is whole already.

    Not for a broadcast: what ranks have of one tensor is the same without it.
    """
    name = call.func._schema.name
    if not name.startswith("c10d::") or "broadcast" in name:
        return
    layouts = ", ".join(
        str(made.placements)
        for made in call.layouts
        if not all(placement.is_replicate() for placement in made.placements)
    )
    if layouts:
        raise ValueError(
            f"a collective of torch.distributed ({name}) was given a distributed tensor with "
            f"placements {layouts}, which is one tensor of all ranks and not what each of them "
            "has: sums, means and rows are already those of all ranks. Leave the collective out, "
            "which is there for DistributedDataParallel, often below dist.is_initialized()"
        )


def _views(call: OpCall, shared: bool, result: Any) -> Any:
    """Wrap local views of a base; if that had to be gathered, they follow it."""
    base = call.tensors[0]
    assert isinstance(base, DTensor)
    index = -1

    def of(whole: Tensor) -> Any:
        args, kwargs = call.with_tensors([whole])
        return call.func(*args, **kwargs)

    def link(local: Tensor) -> DTensor:
        nonlocal index
        index += 1
        view = whole(local, call.mesh, offset=offset_of(local) + int(base.storage_offset()))
        if not shared:
            view._alias_of = GatheredView(base, of, index, replicated(call.mesh))
        return view

    return pytree.tree_map_only(Tensor, link, result)


def _own_copy(tensor: Tensor, whole: DTensor) -> Tensor:
    """Return what the operator may write into."""
    local = whole._local_tensor
    if not isinstance(tensor, DISTRIBUTED):
        # Emulated ranks have one plain tensor between them, and each would write into it.
        return local.clone() if is_emulated() else tensor
    return local.clone() if local is tensor._local_tensor else local


def _write_back(tensor: Tensor, whole: Tensor) -> None:
    whole = as_it_is(whole)
    if not isinstance(tensor, DISTRIBUTED):
        if whole is not tensor:
            first = part_of(0, whole)
            tensor.resize_(first.shape).copy_(first)
        return
    if follow_shape(tensor, whole):
        return
    made = layout_of(tensor)
    local = redistribute_local(
        whole, made.mesh, made.shape, replicated(made.mesh), made.placements
    )
    tensor._local_tensor.copy_(local)


def _report(call: OpCall) -> None:
    nbytes = sum(
        made.dtype.itemsize
        * redistribution_numel(
            tuple(made.shape), tuple(made.mesh.shape), made.placements, replicated(made.mesh)
        )
        for made in call.layouts
    )
    if not nbytes:
        return
    layouts = ", ".join(str(made.placements) for made in call.layouts)
    if _strict:
        raise Unsupported(
            f"{call.func} has no rule for placements {layouts} and would gather {nbytes} bytes "
            "a rank; redistribute its inputs, or leave strict()"
        )
    if call.func in _warned:
        return
    _warned.add(call.func)
    warnings.warn(
        f"{call.func} has no rule for placements {layouts}; its inputs were gathered "
        f"({nbytes} bytes a rank)",
        GatherWarning,
        stacklevel=2,
    )
