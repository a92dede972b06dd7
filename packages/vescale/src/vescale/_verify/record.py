"""What one run of a training program computed, in the order in which it came about."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale._torch_private import FakeTensor, is_in_backward, pytree
from vescale_dtensor import CommCounter, DTensor
from vescale_parallel import PackedDim


@dataclass(frozen=True, order=True)
class ModuleOutput:
    """One of the tensors that a module returned.

    Attributes:
        step: In which step of training.
        module: Fully qualified name of the module; ``""`` is the model.
        index: Which of the tensors in what it returned.
    """

    step: int
    module: str
    index: int


@dataclass(kw_only=True)
class Record:
    """Everything that is compared; tensors of the state are full, activations are local.

    Attributes:
        initial: Parameters and buffers before the first step, by name.
        activations: What modules returned, one tensor for each call, in the order in which they
            first returned.
        fed_by: The last collective that ended before a module first returned.
        losses: One a step.
        norms: Of all gradients, one a step; empty if they are not clipped.
        gradients: By step and name, before the optimizer's step.
        parameters: By step and name, after the optimizer's step.
        buffers: By step and name, after the optimizer's step.
        generators: State of the CPU's generator, before the first step and after each.
        on_host: Likewise, of the generators of Python and NumPy.
        packed_dims: What tensor parallelism found packed into dims, on a rank.
    """

    initial: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    activations: dict[ModuleOutput, list[Tensor]] = field(
        default_factory=dict[ModuleOutput, list[Tensor]]
    )
    fed_by: dict[ModuleOutput, str] = field(default_factory=dict[ModuleOutput, str])
    losses: list[Tensor] = field(default_factory=list[Tensor])
    norms: list[Tensor] = field(default_factory=list[Tensor])
    gradients: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    parameters: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    buffers: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    generators: list[Tensor] = field(default_factory=list[Tensor])
    on_host: list[bytes] = field(default_factory=list[bytes])
    packed_dims: frozenset[PackedDim] = frozenset()

    @property
    def draws(self) -> bool:
        """Whether training drew random numbers."""
        drawn_on_host = len({*self.on_host}) > 1
        return drawn_on_host or not torch.equal(self.generators[0], self.generators[-1])


def full(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values, gathered from all ranks if it is distributed."""
    values = tensor.detach()
    return (values.full_tensor() if isinstance(values, DTensor) else values).to("cpu", copy=True)


def full_state(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of named tensors; every rank must call this."""
    return {name: full(tensor) for name, tensor in named}


@contextmanager
def recorded_activations(
    model: nn.Module, record: Record, compiled: Collection[str] = ()
) -> Iterator[None]:
    """Record what modules return while the context is open; ``len(record.losses)`` is the step.

    A forward that is run again in backward, to save memory, is not recorded again; neither are
    runs on fake tensors.

    Args:
        model: The model.
        record: What is added to.
        compiled: Names of blocks that are compiled. What modules return within one is not
            recorded: a hook there would break its graph, and another program be looked at.
    """
    with CommCounter() as counter:
        handles = [
            module.register_forward_hook(_recorder(name, record, counter))
            for name, module in model.named_modules()
            if not any(name.startswith(f"{block}.") for block in compiled)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _recorder(name: str, record: Record, counter: CommCounter) -> Any:
    # Models may share a module, an activation function that a file makes once (XLM), and ranks
    # that are emulated are threads.
    rank = threading.get_ident()

    def record_output(module: nn.Module, args: Any, output: Any) -> None:
        if is_in_backward() or threading.get_ident() != rank:
            return
        for index, tensor in enumerate(_tensors(output)):
            key = ModuleOutput(len(record.losses), name, index)
            if key not in record.activations:
                record.fed_by[key] = _text(counter)
            # Of a DTensor, or of what a rank has a slice of behind the blocks.
            to_local = getattr(tensor, "to_local", None)
            local = tensor if to_local is None else to_local()
            record.activations.setdefault(key, []).append(local.detach().to("cpu", copy=True))

    return record_output


def _tensors(output: Any) -> Sequence[Tensor]:
    """Return the real floating-point tensors in what a module returned."""
    return [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and not leaf.is_meta
        and not isinstance(leaf, FakeTensor)
    ]


def _text(counter: CommCounter) -> str:
    if not counter.events:
        return ""
    last = counter.events[-1]
    return f"{last.kind} over {last.over}, {last.num_ranks} ranks"
