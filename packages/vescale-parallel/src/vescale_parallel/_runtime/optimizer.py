"""Torch optimizers on this rank's shards of the parameters."""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vescale_dtensor import (
    DTensor,
    announced_failures,
    distribute_tensor,
    is_sharded,
    profiler_range,
)

from .engine import Engine
from .module import ParallelModule

# Element i of the update depends on element i of parameter, gradient and state alone, so
# that a part of a parameter is updated as it would be within the whole.
_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
}  # fmt: skip

# A count of steps: whole on every rank even if a parameter is a scalar, too.
_COUNTER = "step"


class ParallelOptimizer(Optimizer):
    """Mixed into the class of an optimizer that was built on a parallelized model.

    ``param_groups`` and ``state`` are keyed by the public parameters. During a step they
    hold plain tensors, this rank's parts, so any code path of torch's optimizers runs.
    """

    _vescale_names: dict[nn.Parameter, str]
    _vescale_engine: weakref.ref[Engine]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]: torch overloads it
        """Update this rank's shard of every parameter. ``closure`` is refused."""
        with announced_failures(), profiler_range("optimizer"):
            if closure is not None:
                raise ValueError(
                    "step(closure) is not supported by a parallelized optimizer; call the "
                    "model and backward() first, then step() without arguments"
                )
            return self._vescale_step()

    def _vescale_step(self) -> Any:
        engine = self._vescale_engine()
        if engine is not None:
            engine.parameters.refuse_stray_gradients()
        parts = {
            sharded: _part(sharded) for group in self.param_groups for sharded in group["params"]
        }
        sharded_of = {part: sharded for sharded, part in parts.items()}
        public_groups = [group["params"] for group in self.param_groups]
        public_state = self.state
        self.state = defaultdict(
            dict, {parts[sharded]: _localized(state) for sharded, state in public_state.items()}
        )
        for group in self.param_groups:
            group["params"] = [parts[sharded] for sharded in group["params"]]
        try:
            return super().step()
        finally:
            for group, public in zip(self.param_groups, public_groups, strict=True):
                group["params"] = public
            for part, state in self.state.items():
                public_state[sharded_of[cast(nn.Parameter, part)]] = state
            self.state = public_state

    def state_dict(self) -> dict[str, Any]:
        """Return state by parameter name, as distributed tensors where it has their shape.

        Returns:
            ``{"state": {fqn: {name: value}}, "param_groups": [...]}`` with FQNs for
            parameters; the same on every rank up to which part of a tensor is local.
        """
        state = {
            self._vescale_names[sharded]: {
                name: _globalized(name, value, sharded)
                for name, value in self.state.get(sharded, {}).items()
            }
            for group in self.param_groups
            for sharded in group["params"]
            if self.state.get(sharded)
        }
        return {"state": state, "param_groups": self._groups_by_name()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, under the same plan or another.

        Raises:
            ValueError: If groups or parameter names differ.
        """
        own, groups = self._groups_by_name(), state_dict["param_groups"]
        if [g["params"] for g in own] != [list(g["params"]) for g in groups]:
            raise ValueError(
                "expected an optimizer state with the parameter groups of this optimizer, "
                f"got groups of {[len(g['params']) for g in groups]} parameters for groups of "
                f"{[len(g['params']) for g in own]}"
            )
        by_name = {name: sharded for sharded, name in self._vescale_names.items()}
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        self.state = defaultdict(dict)
        for name, values in state_dict["state"].items():
            self.state[by_name[name]] = {
                key: _local_state(key, value, by_name[name]) for key, value in values.items()
            }

    def state_template(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return empty state to load into, for an optimizer that has not stepped yet.

        Args:
            saved: Dotted path (``state.<fqn>.<name>``) to an object with ``shape`` and
                ``dtype``, as a checkpoint lists it.
        """
        state: dict[str, dict[str, Any]] = {}
        for sharded, fqn in self._vescale_names.items():
            prefix = f"state.{fqn}."
            for path, tensor in saved.items():
                if not path.startswith(prefix) or "." in path[len(prefix) :]:
                    continue
                name = path[len(prefix) :]
                empty = (
                    torch.zeros_like(sharded.detach(), dtype=tensor.dtype)
                    if torch.Size(tensor.shape) == sharded.shape and name != _COUNTER
                    else torch.zeros(tensor.shape, dtype=tensor.dtype)
                )
                state.setdefault(fqn, {})[name] = empty
        return {"state": state, "param_groups": self._groups_by_name()}

    def _groups_by_name(self) -> list[dict[str, Any]]:
        return [
            {**group, "params": [self._vescale_names[sharded] for sharded in group["params"]]}
            for group in self.param_groups
        ]


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
    step = inspect.unwrap(type(optimizer).step)
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
    cls = type(optimizer)
    optimizer.__class__ = type(
        cls.__name__, (ParallelOptimizer, cls), {"__module__": cls.__module__}
    )
    assert isinstance(optimizer, ParallelOptimizer)
    optimizer._vescale_names = names
    assert isinstance(model, ParallelModule)
    optimizer._vescale_engine = weakref.ref(model._vescale_engine)
    return optimizer


def _part(sharded: nn.Parameter) -> nn.Parameter:
    """Return this rank's shard of a parameter and its gradient, as a plain parameter."""
    assert isinstance(sharded, DTensor)
    part = nn.Parameter(sharded._local_tensor, requires_grad=sharded.requires_grad)
    if sharded.grad is not None:
        if not isinstance(sharded.grad, DTensor):
            raise ValueError(
                f"expected the gradient of a parameter of shape {tuple(sharded.shape)} to be a "
                f"distributed tensor, got {type(sharded.grad).__name__}; set it by "
                "parameter.grad = vescale_dtensor.distribute_tensor(grad, "
                "parameter.device_mesh, parameter.placements)"
            )
        part.grad = sharded.grad._local_tensor
    return part


def _localized(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with distributed tensors replaced by their local shards."""
    return {k: v._local_tensor if isinstance(v, DTensor) else v for k, v in state.items()}


def _globalized(name: str, value: Any, sharded: nn.Parameter) -> Any:
    """Return a state tensor that has the parameter's local shape as a distributed tensor."""
    assert isinstance(sharded, DTensor)
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or name == _COUNTER:
        return value
    if value.shape != sharded._local_tensor.shape:
        return value
    return DTensor.from_local(value, sharded.device_mesh, sharded.placements, shape=sharded.shape)


def _local_state(name: str, value: Any, sharded: nn.Parameter) -> Any:
    """Return a loaded state value as the step wants it."""
    assert isinstance(sharded, DTensor)
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        return value._local_tensor.clone()
    if value.shape == sharded.shape and name != _COUNTER:
        return distribute_tensor(value, sharded.device_mesh, sharded.placements)._local_tensor
    return value.clone()
