"""Make optimizers of a parallelized model step on plain parameters."""

from __future__ import annotations

import weakref
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from vescale_dtensor import DTensor, is_sharded
from vescale_parallel._runtime.module import ParallelModule

from .local_shards import LocalShards
from .parallel_optimizer import ParallelOptimizer, plain_step_of
from .plain import PlainParameters, PlainState

# Element i of the update depends on element i of parameter, gradient and state alone, so
# that a part of a parameter is updated as it would be within the whole.
_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
}  # fmt: skip


def parallelize_optimizer(optimizer: object, model: nn.Module) -> Optimizer:
    """Make an optimizer update this rank's shards, in place.

    Args:
        optimizer: Built on the parameters of ``model``, which is parallelized already.
        model: The model.

    Raises:
        TypeError: If it is no torch optimizer.
        ValueError: If it holds a parameter that is not the model's, or its update of an
            element needs the rest of a parameter of which this rank has only a part.
    """
    if not isinstance(optimizer, Optimizer):
        several = isinstance(optimizer, list | tuple) and "; make the others after parallelize"
        raise TypeError(
            "expected optimizer_fn to return a torch optimizer, got "
            f"{None if optimizer is None else type(optimizer).__name__}{several or ''}"
        )
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    held = [sharded for group in optimizer.param_groups for sharded in group["params"]]
    if any(sharded not in names for sharded in held):
        raise ValueError(
            "expected an optimizer of the parallelized model's parameters, got one that holds "
            "another tensor; build it in optimizer_fn from the model it is given"
        )
    step = plain_step_of(type(optimizer))
    owner = step.__qualname__.partition(".")[0]
    elementwise = owner in _ELEMENTWISE and step.__module__.startswith("torch.optim.")
    cut = [
        names[sharded]
        for sharded in held
        if any(map(is_sharded, cast(DTensor, sharded).placements))
    ]
    if cut and not elementwise:
        raise ValueError(
            f"{type(optimizer).__name__}.step is not known to update every element on its own, "
            f"but ranks hold only shards of {len(cut)} parameters ({cut[0]!r}, ...); use one of "
            f"{sorted(_ELEMENTWISE)} or a plan that shards no parameter"
        )
    return _parallel(optimizer, model, names, LocalShards())


def _parallel(
    optimizer: Optimizer,
    model: nn.Module,
    names: dict[nn.Parameter, str],
    plain: PlainParameters,
) -> Optimizer:
    cls = type(optimizer)
    made: Any = type(cls.__name__, (ParallelOptimizer, cls), {"__module__": cls.__module__})
    optimizer.__class__ = made
    assert isinstance(optimizer, ParallelOptimizer)
    assert isinstance(model, ParallelModule)
    optimizer._vescale_names = names
    optimizer._vescale_engine = weakref.ref(model._vescale_engine)
    optimizer._vescale_plain, optimizer._vescale_state = plain, PlainState(plain)
    return optimizer
