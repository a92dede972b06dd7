"""What parallelize refuses before it changes anything."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.optim import Optimizer

from vescale_dtensor import DTensor
from vescale_parallel._parameters.shared_memory import refuse_shared_memory
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._plan.supported import refuse_wrapped

from .module import ParallelModule
from .optimizer.kinds import declared_block

_ORDER = "parallelize(plan, model, optimizer_fn, lr_scheduler_fn, dataset)"


def check_arguments(
    plan: object, model: object, optimizer_fn: object, lr_scheduler_fn: object
) -> None:
    """Refuse arguments of the wrong kind, in the wrong order, or changed by something else.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the model is one that cannot be parallelized.
    """
    _check_plan(plan)
    _check_kind_of_model(model)
    assert isinstance(model, nn.Module)
    _check_model(model)
    for name, value, example in (
        ("optimizer_fn", optimizer_fn, "lambda model: AdamW(model.parameters())"),
        ("lr_scheduler_fn", lr_scheduler_fn, "lambda optimizer: StepLR(optimizer, 1)"),
    ):
        if value is not None and (isinstance(value, Optimizer | nn.Module) or not callable(value)):
            raise TypeError(
                f"expected {name} to be a function, got {type(value).__name__}; "
                + _instead_of(name, value, example)
            )
    if lr_scheduler_fn is not None and optimizer_fn is None:
        raise ValueError("lr_scheduler_fn needs optimizer_fn, whose optimizer it schedules")


def _check_plan(plan: object) -> None:
    if isinstance(plan, ParallelPlan):
        return
    if isinstance(plan, nn.Module):
        advice = f"the order is {_ORDER}"
    elif isinstance(plan, str):
        advice = "read it with ParallelPlan.from_json(text)"
    elif isinstance(plan, Mapping):
        advice = "constraints become a plan by vescale.generate_plan(model, constraints)"
    else:
        advice = "vescale.generate_plan(model) makes one; ParallelPlan() is that of one device"
    raise TypeError(f"expected plan to be a ParallelPlan, got {type(plan).__name__}; {advice}")


def _check_kind_of_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        name = model.__name__
        raise TypeError(
            f"expected model to be an nn.Module, got the class {name}; "
            f"construct it, {name}(...), or vescale.deferred_init({name}, ...)"
        )
    if isinstance(model, ParallelPlan):
        advice = f"the order is {_ORDER}"
    elif isinstance(model, Mapping):
        advice = "give the module itself, and its state to model.load_state_dict"
    elif isinstance(model, list | tuple):
        advice = "parallelize one module, of which the others are parts"
    else:
        advice = f"the order is {_ORDER}"
    raise TypeError(f"expected model to be an nn.Module, got {type(model).__name__}; {advice}")


def _check_model(model: nn.Module) -> None:
    if isinstance(model, ParallelModule):
        raise ValueError(
            f"{type(model).__name__} is parallelized already; give parallelize the plain module"
        )
    refuse_wrapped(model)
    _check_parameters(model)
    refuse_shared_memory(model)


def _check_parameters(model: nn.Module) -> None:
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ValueError(
            "expected parameters that have a shape, got lazy ones (nn.LazyLinear, ..); run the "
            "model once, then parallelize it"
        )
    for fqn, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{fqn!r} has a post-accumulate-grad hook, which would hang on a parameter that "
                "parallelize replaces; register it after parallelize"
            )
        if isinstance(parameter, DTensor | TorchDTensor):
            raise ValueError(
                f"{fqn!r} is a distributed tensor already; give parallelize the plain module, "
                "and say how it is sharded by the plan (tensor_parallel.sharding_plan). Models "
                "that share modules are parallelized as one, an nn.Module that contains them"
            )
        if type(parameter) is nn.Parameter and parameter.is_meta:
            raise ValueError(
                f"{fqn!r} is on the meta device and has no values; construct the model by "
                "vescale.deferred_init(Net, ...), which has none either and remembers how to "
                "make them"
            )


def _instead_of(name: str, value: object, example: str) -> str:
    if hasattr(value, "__getitem__") or hasattr(value, "__iter__"):
        return f"a data set is given by name: dataset=..; the order is {_ORDER}"
    made_for = "the model" if name == "optimizer_fn" else "the optimizer"
    return f"{made_for} that it needs is made by parallelize: {name}={example}"


def described_arguments(construction: object, **given: object) -> dict[str, str]:
    """Return which arguments of ``parallelize`` a rank was given, to compare with other ranks."""
    kind = "one with values" if construction is None else "deferred"
    said = {"model": kind, "block_numel of declare_optimizer": str(declared_block())}
    return said | {k: "None" if v is None else "given" for k, v in given.items()}
