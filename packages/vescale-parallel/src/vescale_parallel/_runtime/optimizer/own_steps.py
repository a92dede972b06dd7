"""Steps of torch's optimizers that a program makes itself, of a parallelized model's parameters.

[Note: own optimizers] An optimizer that is made after ``parallelize`` has distributed parameters,
and distributed tensors for its state. torch's optimizers list both, and hand the lists to a
function of ten operators for each parameter, each of which would be dispatched in Python: three
times the host time of plain tensors. Where element i of the update depends on element i alone,
these operators do to ranks' parts what they do to plain tensors; so they are handed those. What
a program sees stays as it is: ``param_groups``, ``state`` and ``state_dict`` are distributed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from vescale_dtensor import DTensor
from vescale_parallel._torch_private import is_traced_by_dynamo

from .kinds import is_torchs, updates_of
from .parallel_optimizer import ParallelOptimizer

# The method in which torch's optimizers list what a step reads and writes.
_LISTS = "_init_group"
# Of an optimizer: local tensors in these lists, and the parameters that they are of.
_LISTED = "_vescale_listed"
_MOMENTUM = "momentum_buffer"


@functools.cache
def take_local_tensors() -> None:
    """Have torch's element-wise optimizers step on local tensors, from their next step on."""
    # Once and for good: another thread may be about to call the hooks that torch has.
    register_optimizer_step_pre_hook(_prepare)
    register_optimizer_step_post_hook(_settle)


def _prepare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if is_traced_by_dynamo() or isinstance(optimizer, ParallelOptimizer):
        return
    cls, known = type(optimizer), vars(optimizer)
    if _LISTS in known:
        return
    is_elementwise = is_torchs(cls) and updates_of(cls) == "elements"
    own = getattr(cls, _LISTS, None)
    if own is None or not is_elementwise:
        return
    reference: Any = weakref.ref(optimizer)

    @functools.wraps(own)
    def lists_of(group: dict[str, Any], *lists: Any, **others: Any) -> Any:
        returned = own(reference(), group, *lists, **others)
        if not (group.get("differentiable") or is_traced_by_dynamo()):
            parameters = [*lists[0]]
            is_local = _localize(lists)
            if is_local:
                # What tells that parameters changed, who computes with copies of them.
                increment_version(parameters)
            if is_local and cls.__name__ == "SGD" and group["momentum"]:
                vars(reference())[_LISTED] += zip(lists[0], parameters, strict=True)
        return returned

    known.update({_LISTS: lists_of, _LISTED: []})


def _settle(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give parameters the momentum that SGD has kept by what was in the list."""
    if is_traced_by_dynamo():
        return
    listed: list[tuple[Tensor, Any]] = vars(optimizer).get(_LISTED, [])
    for local, parameter in listed:
        if local is parameter or local not in optimizer.state:
            continue
        made, kept = optimizer.state.pop(local)[_MOMENTUM], optimizer.state[parameter]
        if _MOMENTUM not in kept or kept[_MOMENTUM]._local_tensor is not made:
            how = parameter.device_mesh, parameter.placements
            kept[_MOMENTUM] = DTensor.from_local(made, *how, shape=parameter.shape)
    listed.clear()


def _localize(lists: Sequence[list[Any]]) -> bool:
    """Replace distributed tensors of lists by a rank's, if those of each parameter are alike."""
    # Those that have something for each parameter, the parameters first.
    listed = [each for each in lists if each and len(each) == len(lists[0])]
    found = [_locals_of(*of_one) for of_one in zip(*listed, strict=True)]
    if None in found:
        return False
    for each, locals_ in zip(listed, zip(*filter(None, found), strict=True), strict=True):
        each[:] = locals_
    return True


def _locals_of(parameter: Any, *others: Any) -> list[Any] | None:
    """Return a rank's part of a parameter, its gradient and its state; None if they differ."""
    if not isinstance(parameter, DTensor):
        is_plain = not any(isinstance(each, DTensor) for each in others)
        return [parameter, *others] if is_plain else None
    placements, found = parameter.placements, list[Any]()
    for each in (parameter, *others):
        if isinstance(each, DTensor):
            local = each._local_tensor
            if type(local) is not Tensor or each.placements != placements:
                return None
        else:
            local = each
            if each is not None and each.dim():  # neither a number of steps nor none yet
                return None
        found.append(local)
    return found
