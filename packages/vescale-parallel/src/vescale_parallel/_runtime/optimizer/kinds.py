"""What an optimizer's update of an element depends on: known, declared, or not known."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Literal, get_args

from torch.optim import Optimizer

from .parallel_optimizer import plain_step_of

Updates = Literal["elements", "parameters"]

# Element i of the update depends on element i of parameter, gradient and state alone, so
# that a part of a parameter is updated as it would be within the whole.
_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
}  # fmt: skip
# The update of a parameter depends on all of it, and on no other parameter.
_BY_PARAMETER = {"Adafactor", "Muon"}
_BY_HAND = (
    "make it after parallelize, of model.parameters(), as on one device: its operators then "
    "run on distributed tensors"
)
_IMPOSSIBLE = {
    "LBFGS": f"couples all parameters and calls the model in a closure; {_BY_HAND}",
    "SparseAdam": "takes sparse gradients only, and those of a parallelized model are dense; "
    "use Adam, and Embedding(sparse=False)",
}


@dataclass(frozen=True)
class _Declared:
    updates: Updates
    block_numel: int


_declared: weakref.WeakKeyDictionary[type[Optimizer], _Declared] = weakref.WeakKeyDictionary()


def declare_optimizer(cls: type[Optimizer], *, updates: Updates, block_numel: int = 1) -> None:
    """Say of an optimizer of your own how it can be run on the shards of a parallelized model.

    ``parallelize`` compares what is declared with the optimizer's steps on a small example, and
    refuses it if it is not so.

    Args:
        cls: A class of optimizers. Of subclasses it holds as long as ``step`` is the same.
        updates: ``"elements"`` if an element's update depends on that element of parameter,
            gradient and state alone (Lion): every rank updates its shards. ``"parameters"`` if it
            depends on the rest of the parameter, but on no other parameter (Shampoo, Muon): every
            parameter is updated by one rank, as a whole.
        block_numel: With ``"elements"``: an element's update depends on so many elements that
            follow each other, counted from the parameter's first one in the order of indices, and
            state has a value for each element or for each such block (8-bit Adam). Models that
            are parallelized from then on are cut between blocks only.

    Raises:
        TypeError: If it is no class of optimizers.
        ValueError: If ``updates`` is something else, or ``block_numel`` does not fit it.

    Example:
        >>> import torch
        >>> class Sign(torch.optim.SGD):
        ...     def step(self, closure=None):
        ...         for group in self.param_groups:
        ...             for p in group["params"]:
        ...                 p.data.sub_(group["lr"] * p.grad.sign())
        >>> declare_optimizer(Sign, updates="elements")
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):  # pyright: ignore[reportUnnecessaryIsInstance]: what users pass
        raise TypeError(f"expected a class of torch.optim.Optimizer, got {cls!r}")
    if updates not in get_args(Updates):
        raise ValueError(f"expected updates to be one of {get_args(Updates)}, got {updates!r}")
    if block_numel < 1 or (block_numel > 1 and updates != "elements"):
        raise ValueError(
            "expected block_numel of at least 1, and above 1 with updates='elements' only, got "
            f"{block_numel!r} with updates={updates!r}"
        )
    _declared[cls] = _Declared(updates, block_numel)


def declared_block() -> int:
    """Return the elements that no shard may cut, for any of the optimizers that were declared."""
    return math.lcm(*(declared.block_numel for declared in _declared.values()))


def block_of(cls: type[Optimizer]) -> int:
    """Return the elements that an optimizer updates together, 1 if it does not say so."""
    found = _declaration(cls)
    return 1 if found is None else found.block_numel


def _declaration(cls: type[Optimizer]) -> _Declared | None:
    step = plain_step_of(cls)
    for base in cls.__mro__:
        if base in _declared and plain_step_of(base) is step:
            return _declared[base]
    return None


def updates_of(cls: type[Optimizer]) -> Updates | None:
    """Return what an optimizer's update of an element depends on, None if it is not known."""
    if (declared := _declaration(cls)) is not None:
        return declared.updates
    name = _torch_name(cls)
    if name in _ELEMENTWISE:
        return "elements"
    return "parameters" if name in _BY_PARAMETER else None


def is_torchs(cls: type[Optimizer]) -> bool:
    """Whether an optimizer is torch's as it is."""
    return cls.__module__.startswith("torch.optim.")


def refusal(cls: type[Optimizer]) -> str | None:
    """Return why an optimizer is none for a parallelized model, None if it may be one."""
    return _IMPOSSIBLE.get(_torch_name(cls) or "")


def advice(cls: type[Optimizer]) -> str:
    """Return what to do about an optimizer of which nothing is known."""
    return (
        f"declare how it updates, vescale.declare_optimizer({cls.__name__}, updates='elements' or "
        f"'parameters'), or use {', '.join(sorted(_ELEMENTWISE | _BY_PARAMETER))}; or {_BY_HAND}"
    )


def _torch_name(cls: type[Optimizer]) -> str | None:
    """Return the class of torch whose ``step`` this is, None if it is another one."""
    step = plain_step_of(cls)
    is_of_torch = step.__module__.startswith("torch.optim.")
    return step.__qualname__.partition(".")[0] if is_of_torch else None
