"""What is run whole and on all ranks to be compared: a block, or a model, with its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from vescale_parallel._model.random_copies import in_double
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import ModuleCall

from .modes.side_effects import SideEffects


class Contradiction(ValueError):
    """A plan changes what a module computes.

    Attributes:
        fqn: The module.
        why: What differs.
    """

    def __init__(self, fqn: str, why: str) -> None:
        super().__init__(f"{fqn or 'the model'}: {why}")
        self.fqn, self.why = fqn, why


@dataclass(frozen=True)
class How:
    """How the leaves of a call's inputs and output lie over the ranks.

    Attributes:
        output: None if all of it is whole.
    """

    inputs: tuple[Placement | None, ...]
    output: tuple[Placement | None, ...] | None


@dataclass(eq=False)
class Findings:
    """What runs have shown of parameters' gradients, by parameter FQN.

    Attributes:
        partial: Whole ones of which ranks hold partial gradients.
        whole: Whole ones of which every rank has the whole gradient, and not zero.
        reached: Those with a gradient that is not zero.
    """

    partial: set[str] = field(default_factory=set[str])
    whole: set[str] = field(default_factory=set[str])
    reached: set[str] = field(default_factory=set[str])

    def add(self, block: str, other: Findings, equal: str) -> None:
        """Add what was found of a ``block``, as that of an ``equal`` one."""
        for mine, theirs in (
            (self.partial, other.partial),
            (self.whole, other.whole),
            (self.reached, other.reached),
        ):
            mine |= {equal + name.removeprefix(block) for name in theirs}


@dataclass(frozen=True)
class Region:
    """What is run.

    Attributes:
        module: A block, or a whole model.
        fqn: Its name.
        inputs: Leaves of the arguments: random float64 numbers, real integers.
        spec: How the leaves make up (args, kwargs).
        how: How they lie over ranks.
        empty: Parameters, by identity, that need no values since nothing reads them.
        prepare: Changes every copy of the module before it is run.
        training: Whether it is run in training.
    """

    module: nn.Module
    fqn: str
    inputs: Sequence[Any]
    spec: Any
    how: How
    empty: frozenset[int] = frozenset()
    prepare: Callable[[nn.Module], None] = lambda _: None
    training: bool = False


@dataclass(frozen=True)
class Given:
    """The leaves of a call's arguments, and the gradients of what it returns."""

    inputs: list[Any]
    spec: Any
    cotangents: list[Tensor]


@dataclass(frozen=True)
class Results:
    """One forward and backward: outputs and gradients.

    Attributes:
        outputs: Floats with a gradient.
        tensors: Every leaf of the output that is a tensor, detached; None for others.
        floats: For every leaf of the output, whether it is one of ``outputs``.
        grads: Of every parameter, None without one.
        side_effects: Of forward.
    """

    outputs: list[Tensor]
    tensors: list[Tensor | None]
    floats: list[bool]
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]
    side_effects: SideEffects = field(default_factory=SideEffects)


def region_of_call(
    module: nn.Module, fqn: str, call: ModuleCall, how: How, *, training: bool = False
) -> Region:
    """Return a module with random inputs like those of a call."""
    leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    inputs = [_random_input(leaf) for leaf in leaves]
    return Region(module, fqn, inputs, spec, how, training=training)


def given_input(leaf: Any) -> Any:
    """Return an example's input in float64, random if it is only made up or has no values."""
    if _is_float(leaf) and type(leaf) is Tensor and leaf.device.type != "meta":
        values = in_double(leaf)
        if values.numel() and bool(values.isfinite().all()) and bool((values != 0).any()):
            return values.clone().requires_grad_(leaf.requires_grad)
    return _random_input(leaf)


def _random_input(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if _is_float(leaf):
        dtype = torch.complex128 if leaf.is_complex() else torch.float64
        values = torch.randn(leaf.shape, dtype=dtype)
        return values.requires_grad_(leaf.requires_grad)
    if type(leaf) is Tensor and leaf.device.type != "meta":
        return leaf.detach().cpu().clone()
    return torch.zeros(leaf.shape, dtype=leaf.dtype)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
