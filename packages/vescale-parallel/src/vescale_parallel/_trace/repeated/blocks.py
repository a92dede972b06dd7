"""Repeat calls of equal blocks instead of running them: what is observed is the same.

[Note: repeated blocks] A block's forward is a function of its module and its arguments. Where the
descriptions of both are equal to those of two earlier calls, of which one recorded what the other
did, the call is not run: what was recorded is written down again under its own names, and what it
returns is made anew. Code may do otherwise, and is watched for it:

- Attributes that differ between blocks, such as a layer's number, are equal if they were not read.
- What changes its module, draws a random number, or returns views of what it was given, is run
  whenever it is called.
- A tensor that left a block by another way than its output, in a list that a loss reads or as an
  argument that was written in place, is noticed once an operator takes it or the model returns it.
- The first call of a kind is recorded only to be compared with the second: it may have been the
  first to do something, such as to keep a table that all blocks share.

Where that is noticed behind a call that was repeated, all is observed once more, with every call
run. Not noticed is what code counts outside of modules and arguments, unless one of the first two
calls differs by it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._torch_private import (
    function_modes,
    pytree,
    saved_tensors_hooks_in_force,
    unseen_functions,
)
from vescale_parallel._trace.fake_run import FakeRun, Listener, Operator
from vescale_parallel._trace.generators import States, states_of_generators
from vescale_parallel._trace.observer import Observer

from .attribute_reads import heard_reads, varying_attributes
from .description import Description, described
from .record import Record, Recording, record_of, repeat

# Calls in a row that did what none before them had done, after which no other is compared.
_IN_VAIN = 12


@dataclass(frozen=True)
class _Call:
    """A call of a block that may be one of several equal ones."""

    fqn: str
    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    what: object
    key: object
    description: Description


@dataclass
class _Kind:
    """Calls of one description: what the last of each did that was run.

    ``records`` are by the values of the attributes that were read; ``equal`` are those of which
    the last two were the same.
    """

    records: dict[object, Record] = field(default_factory=dict["object", Record])
    equal: set[object] = field(default_factory=set["object"])
    repeated: list[Record] = field(default_factory=list[Record])
    is_refused: bool = False


class RepeatedBlocks(Listener):
    """Has blocks of a run repeat what an equal call was recorded to do."""

    def __init__(self, run: FakeRun, observer: Observer) -> None:
        self._run, self._observer = run, observer
        self._modules = {fqn: run.model.get_submodule(fqn) for fqn in observer.blocks}
        self._names = {fqn for fqn, _ in run.model.named_modules()}
        self._varying = varying_attributes([*self._modules.values()])
        self._kinds: dict[object, _Kind] = {}
        self._recording: Recording | None = None
        self._outlived: dict[int, tuple[weakref.ref[Tensor], _Kind]] = {}
        self._is_doubted = False
        self._in_vain = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the blocks of the copy ask here first."""
        for fqn, module in self._modules.items():
            if "forward" not in vars(module):
                vars(module)["forward"] = self._asking(fqn, module)
        with heard_reads(self._varying, self._heard):
            yield

    def has_repeated(self) -> bool:
        """Return whether any call was."""
        return any(kind.repeated for kind in self._kinds.values())

    def is_exact(self, output: Any) -> bool:
        """Return whether it is sure that running everything would have come to the same."""
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        repeated = (record for kind in self._kinds.values() for record in kind.repeated)
        return not self._is_doubted and all(record.is_kept() for record in repeated)

    def entered(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take note of a block inside of another."""
        if self._recording is not None and fqn in self._modules:
            self._recording.is_refused = True

    def operator(self, ran: Operator) -> None:
        """Watch for tensors that have left a block other than by its output."""
        if self._outlived:
            for tensor in ran.inputs:
                self._see(tensor)
        if self._recording is not None:
            self._recording.saw(ran)

    def _see(self, tensor: Tensor) -> None:
        reference, kind = self._outlived.get(id(tensor), (None, None))
        if kind is not None and reference is not None and reference() is tensor:
            kind.is_refused = True
            self._is_doubted |= bool(kind.repeated)

    def _heard(self, module: nn.Module, name: str, *, is_read: bool) -> None:
        if self._recording is not None:
            self._recording.used(module, name, is_read=is_read)

    def _asking(self, fqn: str, module: nn.Module) -> Any:
        forward = module.forward

        @functools.wraps(forward)
        def ask(*args: Any, **kwargs: Any) -> Any:
            call = (
                None if self._recording is not None else self._described(fqn, module, args, kwargs)
            )
            if call is None:
                return forward(*args, **kwargs)
            kind = self._kinds.setdefault(call.key, _Kind())
            if kind.is_refused:
                return forward(*args, **kwargs)
            for at in kind.equal:
                record = kind.records[at]
                if record.fits(module, fqn, self._names):
                    self._in_vain = 0
                    kind.repeated.append(record)
                    return repeat(record, self._observer, fqn, module, call.description.tensors)
            return self._recorded(call, kind, forward)

        return ask

    def _described(
        self, fqn: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Call | None:
        """Return what decides what a call does; None if that is not known, or all differ."""
        observer = self._observer
        if self._in_vain == _IN_VAIN:
            return None
        self._in_vain += 1
        hooks = saved_tensors_hooks_in_force(False)
        if observer.calls[observer.call].fqn != fqn or hooks is None or hooks[0] != observer.saved:
            return None
        with unseen_functions():
            found = described(self._new_description, module, args, kwargs)
            if found is None:
                return None
            what, description = found
            kept = tuple(
                (storage in observer.kept_first, storage in observer.uncounted.weights)
                for storage in (tensor.untyped_storage() for tensor in description.tensors)
            )
        key = what, kept, _surroundings()
        return _Call(fqn, module, (args, kwargs), what, key, description)

    def _new_description(self) -> Description:
        return Description(self._run.values, self._varying, self._run.hooks)

    def _recorded(self, call: _Call, kind: _Kind, forward: Any) -> Any:
        """Run a call and compare what it did with what an equal one did."""
        args, kwargs = call.given
        before = states_of_generators()
        recording = self._recording = Recording(self._observer, call.module)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._recording = None
        with unseen_functions():
            for each in recording.outlived(output):
                self._outlived[id(each)] = weakref.ref(each), kind
            again = described(self._new_description, call.module, args, kwargs)
            is_same = again is not None and again[0] == call.what
            record = record_of(recording, call.fqn, output, call.description, self._run.values)
        if record is None or not is_same or _has_drawn(before):
            kind.is_refused = True
            return output
        same = kind.records.get(record.read) == record
        self._in_vain *= not same
        (kind.equal.add if same else kind.equal.discard)(record.read)
        kind.records[record.read] = record
        return output


def _has_drawn(before: States) -> bool:
    now = states_of_generators()
    return before.differs_outside_of_torch(now) or not torch.equal(before.torch, now.torch)


def _surroundings() -> object:
    """Return what is in force around a call."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        len(function_modes()),
        *(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ),
    )
