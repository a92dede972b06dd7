"""Observe a model: one forward on fake tensors, and what it computed, kept and passed on."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from vescale_parallel._model.blocks import numel_of, pipeline_blocks
from vescale_parallel._model.inputs import bind, opened, usual_num_rows
from vescale_parallel._torch_private import pytree

from .fake_run import FakeRun, Listener, Operator
from .fake_tensors import is_float
from .flops import Uncounted, flops_of
from .fused_attention import FusedAttention
from .observation import (
    BlockObservation,
    ModuleObservation,
    Observation,
    OutsideObservation,
    Shapes,
)


def observe(
    model: nn.Module,
    batch: Any = None,
    blocks: tuple[str, ...] | None = None,
    *,
    fused_attention: bool = False,
) -> Observation:
    """Run one forward of a copy of the model that has shapes and no memory.

    Floating-point tensors are fake. Integers stay real, so that code that looks at masks
    and positions works. The model is not changed, and nothing is drawn from the random
    number generators.

    Args:
        model: May be real, on the meta device, or deferred: only shapes and dtypes are read.
        batch: What one micro-batch looks like: a mapping (``model(**batch)``, or
            ``model(batch)`` if forward takes no such names), a tuple (``model(*batch)``), or
            a tensor. Without one nothing is run.
        blocks: The block of every call of one, in order; None for those of
            :func:`pipeline_blocks`, each called once.
        fused_attention: Whether ``F.scaled_dot_product_attention`` keeps no scores whatever it is
            given, as on accelerators. CPUs keep them with dropout, and of narrower values.

    Raises:
        ObservationError: If the forward needs values that a fake tensor does not have.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> found = observe(model, torch.zeros(3, 4))
        >>> found.flops, found.rows
        (48, 3)
    """
    blocks = _block_fqns(model) if blocks is None else blocks
    batch = opened(batch)
    if batch is None:
        return Observation(
            ran=False,
            numel=numel_of(model),
            blocks=tuple(
                BlockObservation(fqn=f, numel=numel_of(model.get_submodule(f))) for f in blocks
            ),
            outside=tuple(OutsideObservation(fqn=f, numel=n) for f, n in _owners(model, blocks)),
        )
    run = FakeRun(model)
    observer = _Observer(run.model, blocks)
    given = bind(run.model, run.batch(batch))
    hooks = saved_tensors_hooks(observer.saved, lambda saved: saved.tensor)
    attention = FusedAttention() if fused_attention else contextlib.nullcontext()
    with torch.enable_grad(), hooks, attention:
        output = run.forward(given, observer)
    return _summary(observer, output, batch)


def _summary(run: _Observer, output: Any, batch: Any) -> Observation:
    """Add up what was heard of a run. ``output`` keeps alive what backward would need."""
    saved, modules = run.saved_bytes(), run.module_observations()
    blocks = tuple(
        BlockObservation(
            fqn=fqn,
            numel=numel_of(run.model.get_submodule(fqn)),
            flops=run.flops.get(index, 0),
            saved_bytes=saved.get(index, 0),
            output_bytes=run.output_bytes.get(index, 0),
        )
        for index, fqn in enumerate(run.blocks)
    )
    before, after = -1, len(run.blocks)
    owners = dict(_owners(run.model, run.blocks))
    outside = [
        OutsideObservation(fqn=fqn, numel=owners.pop(fqn), position=run.position(where))
        for fqn, where in run.uses().items()
    ]
    outside += [OutsideObservation(fqn=fqn, numel=numel) for fqn, numel in owners.items()]
    rows, tokens = _rows_and_tokens(batch)
    return Observation(
        ran=True,
        numel=numel_of(run.model),
        flops=sum(run.flops.values()),
        saved_bytes=sum(saved.values()),
        output_bytes=_activation_bytes(output),
        blocks=blocks,
        outside=tuple(outside),
        modules=modules,
        uncounted=tuple(run.uncounted.operators),
        before_flops=run.flops.get(before, 0),
        after_flops=run.flops.get(after, 0),
        before_saved_bytes=saved.get(before, 0),
        after_saved_bytes=saved.get(after, 0),
        rows=rows,
        tokens=tokens,
    )


@dataclass(eq=False)
class _Saved:
    """A tensor that autograd keeps. Dies with the graph node that keeps it."""

    tensor: torch.Tensor
    where: int
    call: int


@dataclass(eq=False)
class _CountedCall:
    """A call of a module; ``parent`` is the index of the call that it was made in."""

    fqn: str
    parent: int
    inputs: Shapes
    outputs: Shapes = ()
    flops: int = 0


@dataclass(eq=False)
class _Observer(Listener):
    """Where a forward is (-1 before the blocks, then the block) and what it did there."""

    model: nn.Module
    blocks: tuple[str, ...]
    where: int = -1
    flops: dict[int, int] = field(default_factory=dict[int, int])
    output_bytes: dict[int, int] = field(default_factory=dict[int, int])
    called: dict[str, int] = field(default_factory=dict[str, int])
    read: dict[torch.UntypedStorage, int] = field(
        default_factory=dict["torch.UntypedStorage", int]
    )
    calls: list[_CountedCall] = field(default_factory=list[_CountedCall])
    call: int = -1
    _entered: dict[str, int] = field(default_factory=dict[str, int])
    _returned: tuple[int, Any] | None = None
    _saved: list[weakref.ref[_Saved]] = field(default_factory=list["weakref.ref[_Saved]"])

    def __post_init__(self) -> None:
        self.uncounted = Uncounted(self.model.parameters())
        self._calls_left: dict[str, list[int]] = {}
        for index, fqn in enumerate(self.blocks):
            self._calls_left.setdefault(fqn, []).append(index)
        self._parameters = {each.untyped_storage() for each in self.model.parameters()}

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.calls.append(_CountedCall(fqn, self.call, _shapes((args, kwargs))))
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
            self.output_bytes[index] = _activation_bytes(output)
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
        nbytes = _activation_bytes([x for x in pytree.tree_leaves(output) if id(x) in given])
        self.output_bytes[index] = nbytes or self.output_bytes[index]

    def raised(self, fqn: str) -> None:
        self.call = self.calls[self.call].parent

    def operator(self, ran: Operator) -> None:
        for storage in (tensor.untyped_storage() for tensor in ran.inputs):
            if storage in self._parameters:
                self.read.setdefault(storage, self.where)
        if ran.is_integer:
            return
        flops = flops_of(ran.func, ran.args, ran.kwargs, ran.output)
        if flops is None:
            self.uncounted.see(ran.func, ran.inputs, ran.output)
        else:
            self._add_flops(flops)

    def saved(self, tensor: torch.Tensor) -> _Saved:
        """Take note of a tensor that autograd keeps, and return what it is to keep instead."""
        saved = _Saved(tensor, self.where, self.call)
        self._saved.append(weakref.ref(saved))
        return saved

    def _add_flops(self, flops: int) -> None:
        """Count the flops of an operator where it ran."""
        self.flops[self.where] = self.flops.get(self.where, 0) + flops
        self.calls[self.call].flops += flops

    def uses(self) -> dict[str, int]:
        """Return where each module outside the blocks was first used, in that order.

        A module that holds the blocks is entered before them whatever it does with its own
        parameters, and some modules are never called: there the first operator counts.
        """
        found: dict[str, int] = {}
        for fqn, _ in _owners(self.model, self.blocks):
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

    def _kept(self) -> Iterator[tuple[_Saved, int]]:
        """Yield the first of what keeps each storage still, and the bytes of the storage."""
        state = [*self.model.parameters(), *self.model.buffers()]
        seen = {tensor.untyped_storage() for tensor in state}
        for saved in filter(None, (reference() for reference in self._saved)):
            storage = saved.tensor.untyped_storage()
            if storage not in seen:
                seen.add(storage)
                yield saved, storage.nbytes()

    def position(self, where: int) -> Literal["before", "between", "after"]:
        if where < 0:
            return "before"
        return "after" if where == len(self.blocks) else "between"


def _block_fqns(model: nn.Module) -> tuple[str, ...]:
    try:
        return pipeline_blocks(model)
    except ValueError:  # no list of blocks, or more than one
        return ()


def _owners(model: nn.Module, blocks: tuple[str, ...]) -> list[tuple[str, int]]:
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


def _activation_bytes(output: Any) -> int:
    """Return the bytes of the distinct floating-point tensors in a module's output."""
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    sizes = {id(t): t.numel() * t.element_size() for t in tensors if is_float(t.dtype)}
    return sum(sizes.values())


def _rows_and_tokens(batch: Any) -> tuple[int, int]:
    rows = usual_num_rows(batch)
    if rows is None:
        return 1, 1
    for tensor in (t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)):
        if tensor.dim() == (3 if is_float(tensor.dtype) else 2) and tensor.shape[0] == rows:
            return rows, math.prod(tensor.shape[:2])
    return rows, rows
