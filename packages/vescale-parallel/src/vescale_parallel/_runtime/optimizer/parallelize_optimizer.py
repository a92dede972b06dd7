"""Make optimizers of a parallelized model step on plain parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from vescale_dtensor import DTensor
from vescale_parallel._model.code import mix_in
from vescale_parallel._runtime.module import ParallelModule
from vescale_parallel._torch_private import HUNG_BY_SCHEDULER, STEP_WAS_CALLED

from .block_state import BlockState, refuse_cut_blocks
from .example_check import check_updates
from .kinds import advice, block_of, is_torchs, refusal, updates_of
from .local_shards import LocalShards
from .matrices import Matrices, matrices_of
from .parallel_optimizer import ParallelOptimizer, is_cut
from .plain import PlainParameters, PlainState, refuse_state_of_none
from .whole_parameters import WholeParameters


def parallelize_optimizer(optimizer: object, model: nn.Module) -> Any:
    """Make an optimizer, or each of several, update distributed parameters, in place.

    Args:
        optimizer: Built on the parameters of ``model``, which is parallelized already; or a list
            or tuple of such.
        model: The model.

    Returns:
        What it was given.

    Raises:
        TypeError: If it is no torch optimizer.
        ValueError: If it holds a parameter that is not the model's, or nothing is known of how
            it updates, or something else than what it does.
    """
    if isinstance(optimizer, list | tuple) and optimizer:
        each_in: Any = optimizer
        for each in each_in:
            _parallelize(each, model)
        return each_in
    return _parallelize(optimizer, model)


def _parallelize(optimizer: object, model: nn.Module) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "expected optimizer_fn to return a torch optimizer or a list of them, got "
            f"{None if optimizer is None else type(optimizer).__name__}"
        )
    cls = type(optimizer)
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    held = [sharded for group in optimizer.param_groups for sharded in group["params"]]
    if any(sharded not in names for sharded in held):
        raise ValueError(
            "expected an optimizer of the parallelized model's parameters, got one that holds "
            "another tensor; build it in optimizer_fn from the model it is given"
        )
    if (told := refusal(cls)) is not None:
        raise ValueError(f"{cls.__name__} {told}")
    refuse_state_of_none(cls.__name__, optimizer.state)
    updates = updates_of(cls)
    cut = [names[sharded] for sharded in held if is_cut(sharded)]
    if cut and updates is None:
        raise ValueError(
            f"{cls.__name__}.step is not known to update every element, or every parameter, on "
            f"its own, but ranks hold only shards of {len(cut)} parameters ({cut[0]!r}, ...); "
            f"{advice(cls)}"
        )
    blocks = BlockState(block_of(cls))
    if blocks.numel > 1:
        refuse_cut_blocks(cls.__name__, blocks.numel, [(names[p], p) for p in held])
    if updates is not None and not is_torchs(cls) and any(map(is_cut, names)):
        blocks = BlockState(blocks.numel, check_updates(optimizer, updates, blocks.numel))
    matrices = matrices_of(model, names)
    if updates is None and (several := [names[p] for p in held if p in matrices]):
        raise ValueError(
            f"{cls.__name__}.step is not known to update every parameter on its own, but "
            f"{several[0]!r} is declared to be several matrices; {advice(cls)}"
        )
    if updates == "parameters" and names:
        mesh = cast(DTensor, next(iter(names))).device_mesh
        if mesh.size() > 1 or matrices:
            whole = WholeParameters(mesh, matrices, _strides_of(model))
            whole = _owned(optimizer, whole, matrices)
            return _with(optimizer, model, names, whole)
    return _with(optimizer, model, names, LocalShards(is_torchs=is_torchs(cls), blocks=blocks))


def _strides_of(model: nn.Module) -> dict[Any, tuple[int, ...]]:
    """Return the strides that parameters have on one device."""
    assert isinstance(model, ParallelModule)
    params = model._vescale_engine.parameters.params
    return {param.sharded: param.stride for param in params if param.stride is not None}


def _owned(
    optimizer: Optimizer, whole: WholeParameters, matrices: Mapping[Any, Matrices]
) -> WholeParameters:
    """Leave what the constructor has put into the state with the owners."""
    if any(values and parameter in matrices for parameter, values in optimizer.state.items()):
        raise ValueError(
            f"{type(optimizer).__name__} makes the state of a parameter when it is constructed, "
            "so it cannot be that of each of several matrices (vescale.declare_matrices); make "
            "it at the first step, or split the parameter in the model"
        )
    whole.own(p for group in optimizer.param_groups for p in group["params"])
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    for parameter, values in optimizer.state.items():
        taken = whole.taken(cast(nn.Parameter, parameter), values)
        if taken is not None:
            state[parameter] = taken
    optimizer.state = cast(Any, state)
    return whole


def _with(
    optimizer: Optimizer,
    model: nn.Module,
    names: dict[nn.Parameter, str],
    plain: PlainParameters,
) -> Optimizer:
    cls = type(optimizer)
    mix_in(optimizer, ParallelOptimizer)
    assert isinstance(optimizer, ParallelOptimizer)
    assert isinstance(model, ParallelModule)
    optimizer._vescale_names, optimizer._vescale_is_known = names, updates_of(cls) is not None
    optimizer._vescale_engine = weakref.ref(model._vescale_engine)
    optimizer._vescale_plain, optimizer._vescale_state = plain, PlainState(plain)
    _follow_step(optimizer)
    return optimizer


def _follow_step(optimizer: Optimizer) -> None:
    """Have a scheduler that was made of an optimizer follow the ``step`` of its class of now.

    A scheduler hangs a ``step`` on the optimizer itself, which calls that of its class of then.

    Raises:
        ValueError: If something else hangs there.
    """
    hung = vars(optimizer).pop("step", None)
    if hung is None:
        return
    if not hasattr(hung, HUNG_BY_SCHEDULER):
        raise ValueError(
            f"the step of this {type(optimizer).__name__} was replaced by another function, which "
            "would run on distributed parameters; replace it after parallelize"
        )
    held = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        own = held()
        assert own is not None
        vars(own)[STEP_WAS_CALLED] = True  # looked at by the scheduler's own step
        return type(own).step(own, *args, **kwargs)

    vars(step)[HUNG_BY_SCHEDULER] = True
    vars(optimizer)["step"] = step
