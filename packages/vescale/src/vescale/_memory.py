"""What a rank's memory holds at its fullest, by category, beside what a plan predicts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from vescale_dtensor import DTensor, listening_to_ranges
from vescale_planner import RankMemory

from ._torch_private import FakeTensor, TorchDispatchMode, pytree

CATEGORIES: tuple[str, ...] = (
    "parameters", "buffers", "gradients", "optimizer", "activations", "communication",
)  # fmt: skip
_ACTIVATIONS, _COMMUNICATION = "activations", "communication"
# What a prediction says of them, where it says it.
_PREDICTED = ("parameters", "gradients", "optimizer", "activations")


@dataclass(kw_only=True)
class MemoryReport:
    """Bytes of tensors on one rank when it had the most, by category; they add up to ``peak``.

    Attributes:
        rank: Whose.
        nbytes: By category. ``parameters`` are this rank's shards and what is gathered of them;
            ``communication`` is what collectives send and receive, gradients that are packed for
            them included; ``activations`` are what else forward and backward make.
        predicted: What was predicted of this rank.
    """

    rank: int = 0
    nbytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    predicted: RankMemory | None = None

    @property
    def peak(self) -> int:
        """All together."""
        return sum(self.nbytes.values())

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: {_mb(self.peak)} of tensors at most"]
        for category in CATEGORIES:
            said = ""
            if self.predicted is not None and category in _PREDICTED:
                said = f", predicted {_mb(getattr(self.predicted, category))}"
            lines.append(f"  {category:<14}{_mb(self.nbytes[category]):>12}{said}")
        return "\n".join(lines)


@contextmanager
def memory_report(
    model: nn.Module, optimizer: Optimizer | None = None, *, predicted: RankMemory | None = None
) -> Iterator[MemoryReport]:
    """Count the tensors of the steps inside, and report what there was when there was most.

    Every operator is looked at, which takes time: report a step or two. Outside of the block it
    costs nothing. What kernels and the allocator hold besides is not counted, nor what other
    threads allocate. The report is filled in when the block ends.

    Args:
        model: Parallelized or not.
        optimizer: What trains it, for its state.
        predicted: This rank's of ``vescale_planner.predict(model, plan).memory``, to print beside.

    Example:
        >>> model = nn.Linear(256, 256, bias=False)
        >>> with memory_report(model) as report:
        ...     model(torch.ones(64, 256)).sum().backward()
        >>> report.nbytes["parameters"], report.nbytes["gradients"]
        (262144, 262144)
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    report = MemoryReport(rank=rank, predicted=predicted)
    log = _Log()
    held = _Held(log, model, optimizer)
    held.label()
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(held.label_gathered).remove)
        if optimizer is not None:
            stack.callback(optimizer.register_step_pre_hook(held.before_step).remove)
        stack.enter_context(listening_to_ranges(log.range_begins))
        stack.enter_context(_Watch(log))
        yield report
    held.label()
    report.nbytes = log.at_peak()


class _Log:
    """When which memory came and went, and what it was for, as far as that is known by then."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []  # number of the memory, bytes that came
        self._labels: dict[int, str] = {}
        self._alive: dict[int, int] = {}  # address to number
        self._num_memories = 0
        self._depth = 0
        self.is_open = True

    def range_begins(self, words: tuple[object, ...], nbytes: int) -> Callable[[], None]:
        """Note that a collective runs."""
        self._depth += bool(nbytes)

        def end() -> None:
            self._depth -= bool(nbytes)

        return end

    def see(self, tensor: Tensor, label: str = "") -> None:
        """Note the memory of a tensor that is there now, and what it is for, if that is known."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not address or not nbytes:
            return
        number = self._alive.get(address)
        if number is None:
            number = self._num_memories
            self._num_memories += 1
            self._alive[address] = number
            self._events.append((number, nbytes))
            self._labels[number] = _COMMUNICATION if self._depth else _ACTIVATIONS
            weakref.finalize(storage, self._free, address, number, nbytes).atexit = False
        if label:
            self._labels[number] = label

    def send(self, tensor: Tensor) -> None:
        """Note that a collective has a tensor, of which no more is known."""
        self.see(tensor)
        number = self._alive.get(tensor.untyped_storage().data_ptr())
        if number is not None and self._labels[number] == _ACTIVATIONS:
            self._labels[number] = _COMMUNICATION

    def _free(self, address: int, number: int, nbytes: int) -> None:
        if self.is_open:
            self._events.append((number, -nbytes))
        if self._alive.get(address) == number:
            del self._alive[address]

    def at_peak(self) -> dict[str, int]:
        """End, and return bytes by category when there were most."""
        self.is_open = False
        total, most, when = 0, 0, 0
        for index, (_, nbytes) in enumerate(self._events):
            total += nbytes
            if total > most:
                most, when = total, index
        found = dict.fromkeys(CATEGORIES, 0)
        for number, nbytes in self._events[: when + 1]:
            found[self._labels[number]] += nbytes
        return found


class _Watch(TorchDispatchMode):
    """Looks at what every operator returns."""

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it runs by operators on what is here, which are seen
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            for leaf in filter(_has_memory, pytree.tree_leaves((args, kwargs))):
                self._log.send(leaf)
        for leaf in pytree.tree_leaves(result):
            if _has_memory(leaf):
                self._log.see(leaf)
        return result


class _Held:
    """What memory is held for: by the model, its gradients and its optimizer."""

    def __init__(self, log: _Log, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._log, self._model, self._optimizer = log, model, optimizer

    def label(self) -> None:
        """Label all that is held now."""
        for parameter in self._model.parameters():
            self._see([parameter.detach()], "parameters")
        self._see(self._model.buffers(), "buffers")
        self.before_step()
        if self._optimizer is not None:
            self._see(pytree.tree_leaves(list(self._optimizer.state.values())), "optimizer")

    def before_step(self, *_: object) -> None:
        grads = [parameter.grad for parameter in self._model.parameters()]
        self._see([grad for grad in grads if grad is not None], "gradients")

    def label_gathered(self, module: nn.Module, args: object) -> None:
        """Label parameters as a call of a module has them, whole or not."""
        given = [each for each in module._parameters.values() if each is not None]
        self._see([each.detach() for each in given], "parameters")
        self._see([each.grad for each in given if each.grad is not None], "gradients")

    def _see(self, tensors: Iterable[Any], label: str) -> None:
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if _has_memory(local):
                self._log.see(local, label)


def _has_memory(leaf: object) -> TypeGuard[Tensor]:
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor | FakeTensor):
        return False
    return not leaf.is_meta and leaf.layout == torch.strided


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
