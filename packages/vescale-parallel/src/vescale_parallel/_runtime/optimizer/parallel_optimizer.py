"""The class of a parallelized optimizer: torch's own steps on plain parameters."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from vescale_dtensor import announced_failures, is_sharded, profiler_range
from vescale_parallel._runtime.engine import Engine

from .plain import PlainParameters, PlainState, Saved

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class ParallelOptimizer(Optimizer):
    """Mixed into the class of an optimizer that was built on a parallelized model.

    ``param_groups`` and ``state`` are keyed by the public parameters. During a step they
    hold plain tensors, so any code path of torch's optimizers runs. Hooks of a step run around
    that, and see what is public.
    """

    _vescale_names: dict[nn.Parameter, str]
    _vescale_is_known: bool  # how it updates
    _vescale_engine: weakref.ref[Engine]
    _vescale_plain: PlainParameters
    _vescale_state: PlainState

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]: torch overloads it
        """Update the parameters. Every rank must call this. ``closure`` is refused."""
        with announced_failures(), profiler_range("optimizer"):
            if closure is not None:
                raise ValueError(
                    "step(closure) is not supported by a parallelized optimizer; call the "
                    "model and backward() first, then step() without arguments"
                )
            return self._vescale_step()

    @Optimizer.profile_hook_step
    def _vescale_step(self) -> Any:
        engine = self._vescale_engine()
        if engine is not None:
            engine.parameters.refuse_stray_gradients()
        public_groups = [group["params"] for group in self.param_groups]
        written = [p for group in public_groups for p in group if p.grad is not None]
        public_state: Any = self.state
        plain_groups = self._vescale_plain.begin(public_groups)
        self.state = self._vescale_state.begin(public_state)
        for group, plain in zip(self.param_groups, plain_groups, strict=True):
            group["params"] = list(plain)
        # Steps of several classes, one calling the other's, each run the hooks.
        own_hooks = {name: getattr(self, name) for name in _STEP_HOOKS}
        vars(self).update({name: OrderedDict() for name in _STEP_HOOKS})
        is_complete = False
        try:
            result = step_without_hooks(type(self).__mro__[2:])(self)
            is_complete = True
        finally:
            vars(self).update(own_hooks)
            for group, public in zip(self.param_groups, public_groups, strict=True):
                group["params"] = public
            try:
                # First: what a step has assigned to a parameter's data is still there.
                self._vescale_plain.end(is_complete=is_complete)
            finally:
                self._vescale_state.end(public_state, cast("Any", self.state))
                self.state = public_state
                if engine is not None:
                    engine.parameters.tell_changed(written)
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters.

        Raises:
            ValueError: If one of them is not the model's.
        """
        names: Mapping[nn.Parameter, str] | None = vars(self).get("_vescale_names")
        params: Any = param_group.get("params", ())
        if names is not None:
            params = [params] if isinstance(params, nn.Parameter) else list(params)
            param_group["params"] = params
            others = [p for p in params if not isinstance(p, tuple) and p not in names]
            if others:
                raise ValueError(
                    "expected add_param_group to be given parameters of the parallelized model, "
                    f"got another tensor of shape {tuple(others[0].shape)}; an optimizer of its "
                    "own updates it"
                )
            if not self._vescale_is_known and any(map(is_cut, params)):
                raise ValueError(
                    f"{type(self).__name__}.step is not known to update every element, or every "
                    "parameter, on its own, so add_param_group takes none that ranks hold shards "
                    "of; say so by vescale.declare_optimizer before parallelize"
                )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return state by parameter name, as distributed tensors where it is distributed.

        Every rank must call this if the optimizer updates whole parameters, as Muon does.

        Returns:
            ``{"state": {fqn: {name: value}}, "param_groups": [...]}`` with FQNs for
            parameters; the same on every rank up to which part of a tensor is local.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._vescale_plain.shown(
            {
                self._vescale_names[public]: (public, self.state.get(public, {}))
                for group in self.param_groups
                for public in group["params"]
            }
        )
        made: dict[str, Any] = {"state": state, "param_groups": self._groups_by_name()}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, made)
            made = made if changed is None else changed
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, under the same plan or another.

        Or the state of torch's own optimizer of one device, with the same groups, where a
        parameter's number is its place.

        Raises:
            ValueError: If groups or parameter names differ.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, cast("Any", state_dict))
            state_dict = state_dict if changed is None else changed
        own, groups = self._groups_by_name(), state_dict["param_groups"]
        names = _names_of([g["params"] for g in own], [list(g["params"]) for g in groups])
        by_name = {name: public for public, name in self._vescale_names.items()}
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        self.state = defaultdict(dict)
        for key, values in state_dict["state"].items():
            public = by_name[names[key]]
            if _is_torchs(type(self)):
                values = _in_dtype(values, public)
            taken = self._vescale_plain.taken(public, values)
            if taken is not None:
                self.state[public] = taken
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def state_template(self, saved: Mapping[str, Saved]) -> dict[str, Any]:
        """Return empty state to load into, for an optimizer that has not stepped yet.

        Args:
            saved: Dotted path (``state.<fqn>.<name>``) to an object with ``shape`` and
                ``dtype``, as a checkpoint lists it.
        """
        by_name = {name: public for public, name in self._vescale_names.items()}
        state = {
            fqn: self._vescale_plain.empty(by_name[fqn], of_parameter)
            for fqn, of_parameter in _by_parameter(saved, by_name).items()
        }
        state = {fqn: values for fqn, values in state.items() if values}
        return {"state": state, "param_groups": self._groups_by_name()}

    def _groups_by_name(self) -> list[dict[str, Any]]:
        return [
            {**group, "params": [self._vescale_names[public] for public in group["params"]]}
            for group in self.param_groups
        ]


def _names_of(own: Sequence[Sequence[str]], saved: Sequence[Sequence[Any]]) -> dict[Any, str]:
    """Return the name of each parameter of a saved state, which has names or numbers.

    Raises:
        ValueError: If groups or names differ.
    """
    keys = [key for group in saved for key in group]
    names = [name for group in own for name in group]
    are_numbers = all(isinstance(key, int) for key in keys)
    if [*map(len, own)] != [*map(len, saved)]:
        raise ValueError(
            "expected an optimizer state with the parameter groups of this optimizer, got groups "
            f"of {[*map(len, saved)]} parameters for groups of {[*map(len, own)]}"
        )
    if not are_numbers and keys != names:
        here, there = next(pair for pair in zip(names, keys, strict=True) if len({*pair}) > 1)
        raise ValueError(
            "expected an optimizer state with the parameters of this optimizer in its order, got "
            f"{there!r} in the place of {here!r}"
        )
    return dict(zip(keys, names, strict=True))


def _is_torchs(cls: type[Optimizer]) -> bool:
    """Whether a class is one of torch's optimizers, or derived from one."""
    return any(
        base is not Optimizer and base.__module__.startswith("torch.optim.")
        for base in cls.__mro__
    )


def _in_dtype(values: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a parameter's state in its dtype, in which torch's optimizers have it.

    As torch's own ``load_state_dict`` does: what was saved may be of a model in another dtype.
    Counters, which have no dims where the parameter has some, keep theirs.
    """
    made = dict(values)
    for name, value in values.items():
        if isinstance(value, Mapping):  # of one of several matrices
            made[name] = _in_dtype(cast("Mapping[str, Any]", value), parameter)
        elif name != "step" and isinstance(value, Tensor) and value.is_floating_point():
            is_counter = parameter.dim() and not value.dim()
            made[name] = value if is_counter else value.to(parameter.dtype)
    return made


def _by_parameter(
    saved: Mapping[str, Saved], names: Collection[str]
) -> dict[str, dict[str, Saved]]:
    """Return what is saved of each parameter's state, by path below it."""
    found: dict[str, dict[str, Saved]] = {}
    for path, tensor in saved.items():
        first, *parts = path.split(".")
        for cut in range(len(parts) - 1, 0, -1) if first == "state" else ():
            fqn = ".".join(parts[:cut])
            if fqn in names:
                found.setdefault(fqn, {})[".".join(parts[cut:])] = tensor
                break
    return found


def is_cut(parameter: Any) -> bool:
    """Whether ranks hold shards of a distributed parameter."""
    return any(map(is_sharded, parameter.placements))


def plain_step_of(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return the function that is a class's ``step``, without what torch wraps around it."""
    return cast("Callable[..., Any]", inspect.unwrap(cast("Any", cls.step)))


def step_without_hooks(classes: Iterable[type]) -> Callable[..., Any]:
    """Return the ``step`` of the first class that has one, without torch's wrapper for hooks."""
    step: Any = next(vars(each)["step"] for each in classes if "step" in vars(each))
    return step.__wrapped__ if getattr(step, "hooked", False) else step
