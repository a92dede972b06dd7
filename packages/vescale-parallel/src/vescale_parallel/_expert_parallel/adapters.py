"""Adapters that add something to parameters while a module runs: PEFT's LoRA of stacked experts.

Its ``ParamWrapper`` adds a product of two factors to a parameter of the module that it wraps, by a
parametrization that is there for one call. The factors are of all experts, and on all ranks; the
parameter may be of some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from vescale_parallel._torch_private import set_version, version_of

from .experts import Experts

_MADE = "get_delta_weight", "get_delta_factors"  # both with the experts on the first of three dims


def settle_adapters(model: nn.Module) -> None:
    """Have parametrizations of one call not count as writes to the parameters that they leave."""
    for wrapper in model.modules():
        if _is_wrapper(wrapper):
            _Unwritten().install(wrapper)


def slice_adapters(model: nn.Module, experts: Experts, rank: int, num_ranks: int) -> None:
    """Have what wraps a module with this rank's experts add these experts' part to them."""
    local = experts.num_experts // num_ranks
    for wrapper in _wrappers(model, experts.fqn):
        _Sliced(slice(rank * local, (rank + 1) * local)).install(wrapper)


def _wrappers(model: nn.Module, fqn: str) -> Iterator[nn.Module]:
    """Yield what adds something to a parameter of a module, the innermost first."""
    owner, _, name = fqn.rpartition(".")
    while name == "base_layer":
        wrapper = model.get_submodule(owner)
        if _is_wrapper(wrapper):
            yield wrapper
        owner, _, name = owner.rpartition(".")


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is one of PEFT, which is not imported for that."""
    named = isinstance(getattr(module, "parameter_name", None), str)
    return named and hasattr(module, "base_layer") and hasattr(module, "get_param")


class _Unwritten:
    """One call of a wrapper, in which the parameter is given the memory that it has."""

    def __init__(self) -> None:
        self._version = 0

    def install(self, wrapper: nn.Module) -> None:
        """Be asked around every call."""
        wrapper.register_forward_pre_hook(self._enter)
        wrapper.register_forward_hook(self._leave, always_call=True)

    def _enter(self, wrapper: Any, _args: Any) -> None:
        self._version = version_of(wrapper.get_param())

    def _leave(self, wrapper: Any, _args: Any, _output: Any) -> None:
        set_version(wrapper.get_param(), self._version)


class _Sliced:
    """One call of a wrapper, whose methods are others for that alone.

    Copies that are run on one device have all experts, and no hooks.
    """

    def __init__(self, own: slice) -> None:
        self._own = own

    def install(self, wrapper: nn.Module) -> None:
        """Be asked around every call."""
        wrapper.register_forward_pre_hook(self._enter)
        wrapper.register_forward_hook(self._leave, always_call=True)

    def _enter(self, wrapper: nn.Module, _args: Any) -> None:
        for name in _MADE:
            make = getattr(wrapper, name, None)
            if make is not None:
                setattr(wrapper, name, self._part_of(make))

    def _leave(self, wrapper: nn.Module, _args: Any, _output: Any) -> None:
        for name in _MADE:
            vars(wrapper).pop(name, None)

    def _part_of(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def part(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            if isinstance(made, Tensor):
                return made[self._own]
            return tuple(each[self._own] if isinstance(each, Tensor) else each for each in made)

        return part
