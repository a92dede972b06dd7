"""What one call of a block did, apart from its names: recorded, compared, and repeated."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vescale_parallel._torch_private import FakeTensor, pytree
from vescale_parallel._trace.fake_run import Operator
from vescale_parallel._trace.known_values import KnownValues
from vescale_parallel._trace.observation import Shapes
from vescale_parallel._trace.observer import CountedCall, Observer, Saved

from .description import Description

# The call of the block itself; those made in it are counted from 0.
_ITSELF = -1
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Made:
    """A tensor that a block returned."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    nbytes: int

    def again(self) -> Tensor:
        """Return another one."""
        if not self.offset and self.nbytes == self._least_nbytes():
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
        flat = torch.empty(
            self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device
        )
        return flat.as_strided(self.shape, self.stride, self.offset)

    def _least_nbytes(self) -> int:
        lengths = zip(self.shape, self.stride, strict=True)
        last = sum((length - 1) * stride for length, stride in lengths)
        return self.dtype.itemsize * (last + 1) if 0 not in self.shape else 0


@dataclass(frozen=True)
class _Of:
    """Where a tensor comes from: what a call was given, or what it returned, by number."""

    kind: Literal["given", "returned"]
    index: int


@dataclass(frozen=True)
class _Kept:
    """What autograd keeps of a call: a tensor of others, or so many bytes of its own."""

    what: _Of | int
    call: int


@dataclass(frozen=True)
class _InnerCall:
    """A call of a module in a block; ``fqn`` is below that of the block if ``is_inside``."""

    is_inside: bool
    fqn: str
    parent: int
    inputs: Shapes
    outputs: Shapes
    flops: int

    def name(self, block: str) -> str:
        return f"{block}.{self.fqn}" if self.is_inside else self.fqn


@dataclass(frozen=True)
class Record:
    """What a call did, by numbers and names that are those of any equal call.

    Attributes:
        read: Attributes that differ between blocks and were read: module, name, value.
        calls: Of modules inside.
        flops: Of the block's own forward.
        kept: What autograd keeps, in order.
        parameters: Which of the block's parameters operators have read.
        outputs: Leaves of what it returned, and ``structure``.
        references: What has to live for ``kept`` to be true of others.
    """

    read: frozenset[tuple[str, str, object]]
    calls: tuple[_InnerCall, ...]
    flops: int
    kept: tuple[_Kept, ...]
    parameters: tuple[int, ...]
    outputs: tuple[_Made | _Of | tuple[type, object], ...]
    structure: Any
    references: tuple[weakref.ref[Saved], ...] = field(compare=False)

    def fits(self, module: nn.Module, fqn: str, names: Collection[str]) -> bool:
        """Return whether this is what a block does, if its description is equal."""
        return all(
            vars(module.get_submodule(path)).get(name, self) == value
            for path, name, value in self.read
        ) and all(call.name(fqn) in names for call in self.calls)

    def is_kept(self) -> bool:
        """Return whether autograd still keeps all that it did when the call returned."""
        return all(reference() is not None for reference in self.references)


class Recording:
    """Hears what a call does while it runs."""

    def __init__(self, observer: Observer, module: nn.Module) -> None:
        self.is_refused = False
        self.module = module
        self.read: set[tuple[str, str, object]] = set()
        self.parameters: set[torch.UntypedStorage] = set()
        self.observer = observer
        self.where, self.itself = observer.where, observer.call
        self.flops = observer.calls[self.itself].flops
        self.num_calls, self.num_kept = len(observer.calls), len(observer.kept)
        self._paths = {id(each): path for path, each in module.named_modules()}
        self._made: list[weakref.ref[Tensor]] = []

    def saw(self, ran: Operator) -> None:
        """Take note of an operator."""
        for tensor in ran.inputs:
            storage = tensor.untyped_storage()
            if storage in self.observer.parameters:
                self.parameters.add(storage)
        for leaf in pytree.tree_leaves(ran.output):
            if isinstance(leaf, Tensor):
                self._made.append(weakref.ref(leaf))

    def used(self, module: nn.Module, name: str, *, is_read: bool) -> None:
        """Take note of the use of an attribute that differs between blocks."""
        path = self._paths.get(id(module))
        if path is None or not is_read:
            self.is_refused = True
        else:
            self.read.add((path, name, vars(module)[name]))

    def outlived(self, output: Any) -> list[Tensor]:
        """Return the tensors that were made and live on, though they were not returned."""
        returned = {id(leaf) for leaf in pytree.tree_leaves(output)}
        alive = (reference() for reference in self._made)
        return [each for each in alive if each is not None and id(each) not in returned]

    def number(self, call: int) -> int:
        """Return which of the calls in the block one is."""
        return _ITSELF if call == self.itself else call - self.num_calls


def record_of(
    recording: Recording, fqn: str, output: Any, given: Description, values: KnownValues
) -> Record | None:
    """Return what a call has done; None if others cannot be said to do the same."""
    observer = recording.observer
    leaves, structure = pytree.tree_flatten(output)
    outputs = _outputs(leaves, given.tensors, values)
    found = _kept(recording, leaves, given.tensors)
    if recording.is_refused or outputs is None or found is None:
        return None
    kept, references = found
    if kept and not any(isinstance(each, _Made) and each.requires_grad for each in outputs):
        return None
    return Record(
        read=frozenset(recording.read),
        calls=tuple(
            _inner(call, fqn, recording) for call in observer.calls[recording.num_calls :]
        ),
        flops=observer.calls[recording.itself].flops - recording.flops,
        kept=tuple(kept),
        parameters=tuple(
            index
            for index, parameter in enumerate(recording.module.parameters())
            if parameter.untyped_storage() in recording.parameters
        ),
        outputs=tuple(outputs),
        structure=structure,
        references=tuple(references),
    )


def _inner(call: CountedCall, block: str, recording: Recording) -> _InnerCall:
    is_inside = call.fqn.startswith(f"{block}.")
    return _InnerCall(
        is_inside=is_inside,
        fqn=call.fqn.removeprefix(f"{block}.") if is_inside else call.fqn,
        parent=recording.number(call.parent),
        inputs=call.inputs,
        outputs=call.outputs,
        flops=call.flops,
    )


def _outputs(
    leaves: Sequence[Any], given: Sequence[Tensor], values: KnownValues
) -> list[_Made | _Of | tuple[type, object]] | None:
    """Describe what was returned; None if it can be made by running the block alone."""
    found: list[_Made | _Of | tuple[type, object]] = []
    numbers = {id(tensor): _Of("given", index) for index, tensor in enumerate(given)}
    storages = {tensor.untyped_storage() for tensor in given}
    for index, leaf in enumerate(leaves):
        if id(leaf) in numbers:
            found.append(numbers[id(leaf)])
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf), leaf))
        elif isinstance(leaf, FakeTensor) and not values.has(leaf):
            storage = leaf.untyped_storage()
            if storage in storages:
                return None
            storages.add(storage)
            numbers[id(leaf)] = _Of("returned", index)
            found.append(
                _Made(
                    tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()), leaf.dtype,
                    leaf.device, leaf.requires_grad, storage.nbytes(),
                )
            )  # fmt: skip
        else:
            return None
    return found


def _kept(
    recording: Recording, leaves: Sequence[Any], given: Sequence[Tensor]
) -> tuple[list[_Kept], list[weakref.ref[Saved]]] | None:
    """Return what autograd keeps of a call that it had not kept, and what has to live for that."""
    observer = recording.observer
    of = {
        leaf.untyped_storage(): _Of("returned", index)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
    } | {tensor.untyped_storage(): _Of("given", index) for index, tensor in enumerate(given)}
    seen, kept = observer.state, list[_Kept]()
    references: list[weakref.ref[Saved]] = []
    for reference in observer.kept[recording.num_kept :]:
        saved = reference()
        if saved is None or saved.storage in seen:
            continue
        seen.add(saved.storage)
        first = observer.kept_first[saved.storage]
        if first < recording.num_kept:  # and counted there, as long as it is kept there
            references.append(observer.kept[first])
        else:
            references.append(reference)
            what = of.get(saved.storage, saved.storage.nbytes())
            kept.append(_Kept(what, recording.number(saved.call)))
        if references[-1]() is None or saved.where != recording.where:
            return None
    return kept, references


def repeat(
    record: Record, observer: Observer, fqn: str, module: nn.Module, given: Sequence[Tensor]
) -> Any:
    """Write down what an equal call did as done by this one, and return what it returns."""
    itself, num_calls = observer.call, len(observer.calls)

    def index(call: int) -> int:
        return itself if call == _ITSELF else num_calls + call

    for call in record.calls:
        name = call.name(fqn)
        observer.calls.append(CountedCall(name, index(call.parent), call.inputs, call.outputs))
        observer.called.setdefault(name, observer.where)
        observer.add_flops(call.flops, len(observer.calls) - 1)
    observer.add_flops(record.flops, itself)
    parameters = list(module.parameters())
    for number in record.parameters:
        observer.read.setdefault(parameters[number].untyped_storage(), observer.where)
    keeps: list[Saved] = []
    outputs = _outputs_again(record, given, parameters, keeps)
    for each in record.kept:
        match each.what:
            case int(nbytes):
                storage = torch.UntypedStorage(nbytes, device="meta")
            case _Of("given", number):
                storage = given[number].untyped_storage()
            case _Of(_, number):
                storage = outputs[number].untyped_storage()
        keeps.append(observer.keep(storage, index(each.call)))
    return pytree.tree_unflatten(outputs, record.structure)


def _outputs_again(
    record: Record,
    given: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    keeps: list[Saved],
) -> list[Any]:
    made = [each for each in record.outputs if isinstance(each, _Made)]
    needed = [each for each in (*given, *parameters) if each.requires_grad]
    fresh = iter(_Repeated.apply(made, keeps, *needed) if made else ())
    outputs: list[Any] = []
    for each in record.outputs:
        match each:
            case _Made():
                outputs.append(next(fresh))
            case _Of("given", index):
                outputs.append(given[index])
            case _Of(_, index):
                outputs.append(outputs[index])
            case (_, value):
                outputs.append(value)
    return outputs


class _Repeated(torch.autograd.Function):
    """In place of what a block computes: a node of the graph that keeps what the block would."""

    @staticmethod
    def forward(ctx: Any, made: list[_Made], keeps: list[Saved], *needed: Tensor) -> Any:
        ctx.keeps = keeps
        outputs = tuple(each.again() for each in made)
        without = [x for x, each in zip(outputs, made, strict=True) if not each.requires_grad]
        ctx.mark_non_differentiable(*without)
        return outputs
