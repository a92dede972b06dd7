"""Counts what a forward on fake tensors computes, keeps and passes on, and where it does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from vescale_parallel._torch_private import pytree

from .fake_run import Listener, Operator
from .fake_tensors import is_float
from .flops import Uncounted, flops_of
from .observation import ModuleObservation, Shapes


@dataclass(eq=False)
class Saved:
    """What autograd keeps, of a tensor its memory: dies with the graph node that keeps it.

    The tensor itself would keep what it was computed by, itself included where a node keeps what
    it returns: such a graph would never die.
    """

    storage: torch.UntypedStorage
    where: int
    call: int
    again: Callable[[], torch.Tensor] | None = None

    def tensor(self) -> torch.Tensor:
        """Return what was kept, to a backward within the forward."""
        assert self.again is not None
        return self.again()


@dataclass(eq=False)
class CountedCall:
    """A call of a module; ``parent`` is the index of the call that it was made in."""

    fqn: str
    parent: int
    inputs: Shapes
    outputs: Shapes = ()
    flops: int = 0


@dataclass(eq=False)
class Observer(Listener):
    """Where a forward is (-1 before the blocks, then the block) and what it did there.

    Attributes:
        model: The copy that is run.
        blocks: The block of every call of one.
        where: The index of the last of these calls that began; their number behind all of them.
        flops: For each of these places.
        output_bytes: What each of these calls handed to the next.
        called: Where each module was called first.
        read: Where each parameter was read first.
        calls: Of all modules, in order.
        call: The index of the one that runs.
        kept: What autograd was given to keep, in order.
        kept_first: Which of these was the first for each storage.
    """

    model: nn.Module
    blocks: tuple[str, ...]
    where: int = -1
    flops: dict[int, int] = field(default_factory=dict[int, int])
    output_bytes: dict[int, int] = field(default_factory=dict[int, int])
    called: dict[str, int] = field(default_factory=dict[str, int])
    read: dict[torch.UntypedStorage, int] = field(
        default_factory=dict["torch.UntypedStorage", int]
    )
    calls: list[CountedCall] = field(default_factory=list[CountedCall])
    call: int = -1
    _entered: dict[str, int] = field(default_factory=dict[str, int])
    _returned: tuple[int, Any] | None = None
    kept: list[weakref.ref[Saved]] = field(default_factory=list["weakref.ref[Saved]"])
    kept_first: dict[torch.UntypedStorage, int] = field(
        default_factory=dict["torch.UntypedStorage", int]
    )

    def __post_init__(self) -> None:
        self.uncounted = Uncounted(self.model.parameters())
        self._calls_left: dict[str, list[int]] = {}
        for index, fqn in enumerate(self.blocks):
            self._calls_left.setdefault(fqn, []).append(index)
        self.parameters = {each.untyped_storage() for each in self.model.parameters()}

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.calls.append(CountedCall(fqn, self.call, _shapes((args, kwargs))))
        self.call = len(self.calls) - 1
        if fqn in self._calls_left:
            left = self._calls_left[fqn]
            # One that is called more often than was said counts where it was called last.
            self.where = left.pop(0) if len(left) > 1 else left[0]
            self._entered[fqn] = self.where
            self._hand_over(args, kwargs)
        self.called.setdefault(fqn, self.where)

    def left(self, fqn: str, output: Any) -> None:
        call = self.calls[self.call]
        call.outputs = _shapes(output)
        self.call = call.parent
        index = self._entered.get(fqn)
        if index is not None:
            self.output_bytes[index] = activation_bytes(output)
            if index < len(self.blocks) - 1:
                self._returned = index, output
            self.where = index + (index == len(self.blocks) - 1)

    def _hand_over(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count of what the last block returned only what this one gets, if it gets any."""
        if self._returned is None:
            return
        index, output = self._returned
        self._returned = None
        given = {id(leaf) for leaf in pytree.tree_leaves((args, dict(kwargs)))}
        nbytes = activation_bytes([x for x in pytree.tree_leaves(output) if id(x) in given])
        self.output_bytes[index] = nbytes or self.output_bytes[index]

    def raised(self, fqn: str) -> None:
        self.call = self.calls[self.call].parent

    def operator(self, ran: Operator) -> None:
        for storage in (tensor.untyped_storage() for tensor in ran.inputs):
            if storage in self.parameters:
                self.read.setdefault(storage, self.where)
        if ran.is_integer:
            return
        flops = flops_of(ran.func, ran.args, ran.kwargs, ran.output)
        if flops is None:
            self.uncounted.see(ran.func, ran.inputs, ran.output)
        else:
            self.add_flops(flops, self.call)

    def saved(self, tensor: torch.Tensor) -> Saved:
        """Take note of a tensor that autograd keeps, and return what it is to keep instead."""
        saved = self.keep(tensor.untyped_storage(), self.call)
        if tensor.grad_fn is None:
            saved.again = lambda: tensor
        else:
            shape, stride = tensor.shape, tensor.stride()
            like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
            saved.again = lambda: torch.empty_strided(shape, stride, **like)
        return saved

    def keep(self, storage: torch.UntypedStorage, call: int) -> Saved:
        """Take note of what a call of a module has autograd keep."""
        saved = Saved(storage, self.where, call)
        self.kept_first.setdefault(storage, len(self.kept))
        self.kept.append(weakref.ref(saved))
        return saved

    def add_flops(self, flops: int, call: int) -> None:
        """Count the flops of an operator where it ran."""
        self.flops[self.where] = self.flops.get(self.where, 0) + flops
        self.calls[call].flops += flops

    def uses(self) -> dict[str, int]:
        """Return where each module outside the blocks was first used, in that order.

        A module that holds the blocks is entered before them whatever it does with its own
        parameters, and some modules are never called: there the first operator counts.
        """
        found: dict[str, int] = {}
        for fqn, _ in owning_modules(self.model, self.blocks):
            own = self.model.get_submodule(fqn).parameters(recurse=False)
            reads = [self.read[s] for s in (p.untyped_storage() for p in own) if s in self.read]
            holds = any(not fqn or block.startswith(f"{fqn}.") for block in self.blocks)
            if fqn in self.called and not holds:
                found[fqn] = self.called[fqn]
            elif reads:
                found[fqn] = min(reads)
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def saved_bytes(self) -> dict[int, int]:
        """Return the bytes that are still kept, by where they were kept first."""
        found: dict[int, int] = {}
        for saved, nbytes in self._kept():
            found[saved.where] = found.get(saved.where, 0) + nbytes
        return found

    def module_observations(self) -> tuple[ModuleObservation, ...]:
        """Return what every call of a module did, the calls inside of it included."""
        flops = [call.flops for call in self.calls]
        saved_bytes = [0] * len(self.calls)
        for saved, nbytes in self._kept():
            saved_bytes[saved.call] += nbytes
        # A call comes before those that are made in it.
        for index in range(len(self.calls) - 1, 0, -1):
            parent = self.calls[index].parent
            flops[parent] += flops[index]
            saved_bytes[parent] += saved_bytes[index]
        return tuple(
            ModuleObservation(
                fqn=call.fqn,
                inputs=call.inputs,
                outputs=call.outputs,
                flops=flops[index],
                saved_bytes=saved_bytes[index],
            )
            for index, call in enumerate(self.calls)
        )

    def _kept(self) -> Iterator[tuple[Saved, int]]:
        """Yield the first of what keeps each storage still, and the bytes of the storage."""
        seen = set(self.state)
        for saved in filter(None, (reference() for reference in self.kept)):
            if saved.storage not in seen:
                seen.add(saved.storage)
                yield saved, saved.storage.nbytes()

    @property
    def state(self) -> set[torch.UntypedStorage]:
        """Of parameters and buffers."""
        return self.parameters | {each.untyped_storage() for each in self.model.buffers()}

    def position(self, where: int) -> Literal["before", "between", "after"]:
        if where < 0:
            return "before"
        return "after" if where == len(self.blocks) else "between"


def owning_modules(model: nn.Module, blocks: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the modules outside the blocks that own parameters directly, and how many."""
    if not blocks:
        return []
    inside = {b for fqn in blocks for b in _names_below(model, fqn)}
    found: list[tuple[str, int]] = []
    for fqn, module in model.named_modules():
        numel = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if numel and fqn not in inside:
            found.append((fqn, numel))
    return found


def _names_below(model: nn.Module, fqn: str) -> list[str]:
    return [
        f"{fqn}.{name}" if name else fqn for name, _ in model.get_submodule(fqn).named_modules()
    ]


def _shapes(values: Any) -> Shapes:
    leaves = pytree.tree_leaves(values)
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))


def activation_bytes(output: Any) -> int:
    """Return the bytes of the distinct floating-point tensors in a module's output."""
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    sizes = {id(t): t.numel() * t.element_size() for t in tensors if is_float(t.dtype)}
    return sum(sizes.values())
