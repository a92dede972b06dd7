"""One run of a schedule on one rank: does what its list of operations says, in that order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from vescale_dtensor import own_list, profiler_range
from vescale_parallel._model.copies import writable
from vescale_parallel._model.structures import leaves_of
from vescale_parallel._pipeline.schedules import Action
from vescale_parallel._pipeline.schedules.messages import (
    Await,
    Compute,
    Message,
    Operation,
    Receive,
    Reduce,
    Retire,
    Send,
)

from .links import Bundle, Links
from .offload import ActivationsOnHost
from .roots import Roots
from .split_backward import HookedNodes, SplitBackward

# Told every operation when it is done, how many micro-batches of stages wait for their backward,
# and how many messages are kept.
Watcher = Callable[[Operation, int, int], None]
# And what is called when a rank begins a list of operations.
_watchers: list[tuple[Watcher, Callable[[], None]]] = []
own_list(_watchers)
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}


@contextlib.contextmanager
def watching(watcher: Watcher, begins: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Tell ``watcher`` what this rank does in the order in which it does it.

    ``begins`` is called before the first operation of a step.
    """
    _watchers.append((watcher, begins))
    try:
        yield
    finally:
        _watchers.remove((watcher, begins))


@dataclass(eq=False)
class _Pass:
    """What a stage keeps of one micro-batch between forward and backward.

    Attributes:
        received: Of what the stage before sent, that whose gradient it gets; none on the first.
        outputs: Of what goes to the next stage, that whose gradient comes back; on the last one
            where backward begins.
        hooked: Nodes of its graph with hooks of tensors.
        split: Its backward while only the gradient of the input is computed.
    """

    received: Sequence[Tensor]
    outputs: Sequence[Tensor]
    hooked: set[Node]
    split: SplitBackward | None = None


_Key = tuple[str, int, int]  # kind of tensor, stage and micro-batch that need it


@dataclass(eq=False)
class Execution:
    """Runs the operations of one step.

    Attributes:
        links: To other ranks.
        num_stages: Of the pipeline.
        signatures: What shapes depend on, for every micro-batch.
        run: Runs forward of a stage and micro-batch, given what receives its inputs, as many as
            that is given; returns what it sends, on the last stage what the module returns.
        report: Returns what is kept of the latter.
        roots: What of the latter is differentiated, and with which gradients.
        may_split: Whether there are input and weight gradients apart.
        say_whole: Called with a stage and why they could not be computed apart.
        reduce: Begins to sum a stage's gradients over data-parallel ranks: of a micro-batch, None
            for all.
        on_host: Has passes wait with what autograd saved on the host; None: on the device.
        outputs: What was kept, in the order of micro-batches.
    """

    links: Links
    num_stages: int
    signatures: Sequence[object]
    run: Callable[[int, int, Callable[[Sequence[Tensor]], Sequence[Tensor]]], Any]
    report: Callable[[Any], Any]
    roots: Roots
    may_split: bool
    say_whole: Callable[[int, str], None]
    reduce: Callable[[int, int | None], None] = lambda *_: None
    on_host: ActivationsOnHost | None = None
    outputs: list[Any] = field(default_factory=list[Any])
    _tensors: dict[_Key, Bundle] = field(default_factory=dict[_Key, Bundle])
    _arriving: dict[_Key, Message] = field(default_factory=dict[_Key, Message])
    _passes: dict[tuple[int, int], _Pass] = field(default_factory=dict[tuple[int, int], _Pass])
    _waits: frozenset[tuple[int, int]] = frozenset()

    def execute(self, operations: Sequence[Operation]) -> list[Any]:
        """Do what a list says; return the outputs of the last stage.

        A step may be two lists, of its forward passes and of its backward passes.
        """
        for _, begins in _watchers:
            begins()
        if self.on_host is not None and not self._passes:
            self.on_host.begin()
            self._waits = waiting_passes(operations)
        for operation in operations:
            if isinstance(operation, Compute):
                self._compute(operation.action)
            elif isinstance(operation, Reduce):
                self.reduce(operation.stage, operation.microbatch)
            else:
                self._communicate(operation)
            if not isinstance(operation, Await):
                self._tell(operation)
        return self.outputs

    def _tell(self, operation: Operation) -> None:
        for watcher, _ in _watchers:
            watcher(operation, len(self._passes), self.links.num_kept)

    def _compute(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        words = (_WORDS[action.kind], "of stage", action.stage, "micro-batch", action.microbatch)
        if self.on_host is not None and action.kind != "F":
            self.on_host.fetch(key)
        with profiler_range(*words):
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "W":
                split = self._passes.pop(key).split
                if split is not None:
                    split.weight_gradients()
            else:
                self._backward(action, self._passes[key])
        if action.kind == "B":
            del self._passes[key]
        if self.on_host is not None:
            if action.kind in "BW":
                self.on_host.forget(key)
            self.on_host.let_go(key)

    def _communicate(self, operation: Receive | Await | Send | Retire) -> None:
        message = operation.message
        key = (message.lane.kind, message.stage, message.microbatch)
        signature = self.signatures[message.microbatch]
        match operation:
            case Receive():
                self.links.receive(message, signature, self._like(message))
            case Await():
                # Waited for where it is used: what comes before that needs no other rank.
                self._arriving[key] = message
            case Send():
                self.links.send(message, self._tensors.pop(key), signature)
            case Retire():
                self.links.retire(message)

    def _take(self, kind: Literal["F", "B"], action: Action, num_tensors: int) -> Bundle:
        """Return what a pass needs of another stage, of this rank or another one."""
        key = (kind, action.stage, action.microbatch)
        message = self._arriving.pop(key, None)
        if message is None:
            return self._tensors.pop(key)
        signature = self.signatures[action.microbatch]
        found = self.links.arrived(message, signature, self._like(message), num_tensors)
        self._tell(Await(message))
        return found

    def _like(self, message: Message) -> Sequence[Tensor] | None:
        done = self._passes.get((message.stage, message.microbatch))
        return done.outputs if done is not None and message.lane.kind == "B" else None

    def _forward(self, action: Action) -> None:
        received: list[Tensor] = []

        def receive(like: Sequence[Tensor]) -> Sequence[Tensor]:
            bundle, given = self._take("F", action, len(like)), list[Tensor]()
            for tensor, has_grad in zip(bundle.tensors, bundle.has_grad, strict=True):
                if has_grad:
                    received.append(tensor.requires_grad_())
                # A new tensor, so that a block may write to its input in place.
                given.append(writable(tensor) if has_grad else tensor.view_as(tensor))
            return given

        stage, microbatch = action.stage, action.microbatch
        hooked = HookedNodes() if self.may_split and stage > 0 else None
        with hooked or contextlib.nullcontext(), self._saving(stage, microbatch):
            output = self.run(stage, microbatch, receive)
        if stage == self.num_stages - 1:
            self.outputs.append(self.report(output))
            outputs = self.roots.of(output) if torch.is_grad_enabled() else ()
        else:
            bundle = Bundle.of(output)
            self._tensors["F", stage + 1, microbatch] = bundle
            outputs = [x for x, has in zip(output, bundle.has_grad, strict=True) if has]
        if torch.is_grad_enabled():
            nodes = set() if hooked is None else hooked.nodes
            self._passes[stage, microbatch] = _Pass(received, outputs, nodes)

    def _saving(self, stage: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
        key = (stage, microbatch)
        if self.on_host is None or key not in self._waits or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self.on_host.saving(key)

    def _backward(self, action: Action, done: _Pass) -> None:
        """Run backward, or with ``"I"`` as much of it as the stage before waits for."""
        stage, outputs = action.stage, done.outputs
        if stage == self.num_stages - 1:
            outputs, grads = self.roots.with_grads(outputs, action.microbatch)
        else:
            grads = self._take("B", action, len(outputs)).tensors
        # A stage whose parameters are all frozen has nothing to differentiate.
        pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
        if pairs:
            self._differentiate(action, done, [x for x, _ in pairs], [grad for _, grad in pairs])
        if stage > 0:
            found = [torch.zeros_like(x) if x.grad is None else x.grad for x in done.received]
            bundle = Bundle(found, [False] * len(found))
            self._tensors["B", stage - 1, action.microbatch] = bundle
        # What is left to do needs neither.
        done.received = done.outputs = ()

    def _differentiate(
        self, action: Action, done: _Pass, outputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> None:
        # The first stage has no input: nobody waits for a part of its backward.
        if action.kind == "I" and self.may_split and done.received:
            split = SplitBackward.of(outputs, done.received, done.hooked)
            if split.refusal is None:
                done.split = split
                for x, grad in zip(done.received, split.input_gradients(grads), strict=True):
                    x.grad = grad
                return
            self.say_whole(action.stage, split.refusal)
        torch.autograd.backward(outputs, grads)


def waiting_passes(operations: Sequence[Operation]) -> frozenset[tuple[int, int]]:
    """Return the stages and micro-batches behind whose forward another pass of this rank runs."""
    actions = [each.action for each in operations if isinstance(each, Compute)]
    behind = [*actions[1:], None]
    return frozenset(
        (action.stage, action.microbatch)
        for action, other in zip(actions, behind, strict=True)
        if action.kind == "F"
        and (other is None or (other.stage, other.microbatch) != (action.stage, action.microbatch))
    )


def signature_of(microbatch: tuple[Any, Any]) -> object:
    """Return what the shape and dtype of activations can depend on, the same on all stages."""
    tensors = [leaf for leaf in leaves_of(microbatch) if isinstance(leaf, Tensor)]
    autocast = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    ]
    shapes = tuple((t.shape, t.dtype) for t in tensors)
    return (shapes, *autocast, torch.get_default_dtype(), torch.is_grad_enabled())
