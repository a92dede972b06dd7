"""Where an activation changes hands between ranks: conversions that autograd knows.

[Note: regions] Inside a region every rank computes with its own heads or features. A whole
activation *enters*: forward nothing happens to it, backward the ranks' gradients, which are
partial, are summed. What *leaves* is partial, too, and is summed forward; backward every rank
gets the whole gradient. With sequence parallelism activations outside of regions are cut along
the sequence: entering gathers, and backward sums and cuts; leaving sums and cuts, and backward
gathers. These are f, g and their sequence-parallel forms of https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from vescale_parallel._model.linear_layout import LinearKind
from vescale_parallel._torch_private import call_after_backward, is_in_backward

from .async_reduce import Beside, sum_in_parts
from .chunks import part_sizes
from .communicators import Ranks, own_part
from .operators import Kind, Place, convert_traced

Around = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Crossing:
    """An activation that crosses the border of a region, as a listener hears of it.

    Attributes:
        kind: Which method of :class:`Boundary` it was.
        dim: That the activation is cut along outside of the region, None if it is whole there.
        whole_nbytes: Of the whole activation.
    """

    kind: Literal["enter", "leave", "split", "gather"]
    dim: int | None
    whole_nbytes: int


class _Convert(torch.autograd.Function):
    """One conversion forward, another backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, ranks: Ranks, there: Kind, back: Kind, dim: int, length: int
    ) -> Tensor:
        ctx.ranks, ctx.there, ctx.back, ctx.dim, ctx.length = ranks, there, back, dim, length
        result = _run(x, ranks, there, dim, length)
        # Programs may write into what they get, and autograd refuses to write into views that
        # were made in here; of what was received nothing else sees the memory.
        is_of_x = result is x or result._base is x or (x._is_view() and result._base is x._base)
        is_received = result._is_view() and not is_of_x
        return torch.ops.aten._unsafe_view(result, result.shape) if is_received else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        turned = convert(grad, ctx.ranks, ctx.back, ctx.there, ctx.dim, ctx.length)
        return turned, None, None, None, None, None


def convert(
    x: Tensor, ranks: Ranks, there: Kind, back: Kind, dim: int = 0, length: int = 0
) -> Tensor:
    """Do one conversion forward, another backward: along a ``dim``, ``length`` long if whole."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Convert.apply(x, ranks, there, back, dim, length)  # pyright: ignore[reportReturnType]: apply is untyped
    return _run(x, ranks, there, dim, length)


def _run(x: Tensor, ranks: Ranks, kind: Kind, dim: int, length: int) -> Tensor:
    if kind == "sum":
        return ranks.all_reduce(x)
    if kind == "gather":
        return ranks.all_gather(x, dim, length)
    if kind == "scatter":
        return ranks.reduce_scatter(x, dim)
    return own_part(x, dim, ranks) if kind == "keep" else x


_ALWAYS = (
    "call the first and the last block in every call, skip others only, or set "
    "tensor_parallel.sequence to False"
)


class Boundary:
    """The conversions of one group of ranks.

    Args:
        ranks: Who they are.
        even: Refuse sequences that do not divide: the stages of a pipeline behind the first
            only see parts.
        beside: What sums of a layer's parts run on while the next part is computed.
        num_parts: How many parts; 1 sums whole outputs.

    Attributes:
        lengths: How long the cut sequence of each stack of blocks is, as its split found it.
        listener: Called for every activation that crosses; None costs nothing.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        even: bool = False,
        beside: Beside | None = None,
        num_parts: int = 1,
    ) -> None:
        self.ranks = ranks
        self._beside, self._num_parts = beside, num_parts
        self._even = even
        self.lengths: dict[str, int] = {}
        self.listener: Callable[[Crossing], None] | None = None
        self._entered: tuple[weakref.ref[Tensor], tuple[object, ...], Tensor] | None = None
        self._place = Place(ranks)  # while a block is compiled
        self._ends: dict[str, tuple[str, str]] = {}
        self._cut: set[str] = set()
        self._is_running = False

    def watch(self, model: nn.Module, ends: Mapping[str, tuple[str, str]]) -> None:
        """Refuse calls of a model that pass by a module at which a sequence is cut or gathered.

        What entered last is let go of when a call ends. ``ends`` are, of every stack of blocks,
        the modules that cut and that gather.
        """
        self._ends = dict(ends)

        def begin(_: nn.Module, args: Any) -> None:
            self._is_running = True
            self._cut.clear()
            for stack in self._ends:
                self.lengths.pop(stack, None)

        def end(_: nn.Module, args: Any, output: Any) -> None:
            self._is_running = False
            for stack in self._cut:
                first, last = self._ends[stack]
                raise ValueError(
                    f"tensor_parallel.sequence: the sequence that {first!r} sharded is gathered "
                    f"by {last!r}, which was not the last of {stack!r} to be called; {_ALWAYS}"
                )

        if ends:
            model.register_forward_pre_hook(begin, prepend=True)
            model.register_forward_hook(end, prepend=True)
        model.register_forward_hook(lambda *_: self.forget())

    def as_now(self, others: Callable[[], Around]) -> Callable[[], Around]:
        """Return what makes the context of blocks that run again in backward, with others'.

        Sequences are as long there as when they ran first: the model may have run since.
        """

        def now() -> Around:
            lengths, is_running, around = dict(self.lengths), self._is_running, others()

            @contextlib.contextmanager
            def again() -> Iterator[None]:
                latest = dict(self.lengths), self._is_running
                self.lengths.update(lengths)
                self._is_running = is_running
                try:
                    with around():
                        yield
                finally:
                    self.lengths.update(latest[0])
                    self._is_running = latest[1]

            return again

        return now

    def _check_cut(self, x: Tensor, dim: int | None, stack: str) -> None:
        """Raise if an activation is whole where this call should have cut it."""
        if dim is None or stack not in self._ends or not self._is_running:
            return  # what is called from outside of the model is refused as such
        length = self.lengths.get(stack)
        sizes = [] if length is None else part_sizes(length, self.ranks.size)
        if not sizes or sizes[self.ranks.rank] != x.shape[dim]:
            first, _ = self._ends[stack]
            raise ValueError(
                f"tensor_parallel.sequence: a block of {stack!r} got {x.shape[dim]} tokens, "
                f"which {first!r} should have sharded in this call and did not; {_ALWAYS}"
            )

    def enter(self, x: Tensor, dim: int | None, stack: str) -> Tensor:
        """Bring an activation into a region.

        A tensor that several layers read enters once: gradients are summed before they are
        sent, and a cut one is gathered once.
        """
        if torch.compiler.is_compiling():
            # Which layers read one tensor is for the operator to see: here writes are not counted.
            return self._convert_entering(x, dim, stack)
        # Inference tensors have no version: nobody could tell whether they were changed since.
        version = None if x.is_inference() else x._version
        key = (version, torch.is_grad_enabled(), x.requires_grad, dim)
        if self._entered is not None and self._entered[0]() is x and self._entered[1] == key:
            return self._entered[2]
        entered = self._convert_entering(x, dim, stack)
        if self._entered is None and is_in_backward():
            # What runs again ends where backward has all it asked for, before anything leaves.
            call_after_backward(self.forget)
        self._entered = None if version is None else (weakref.ref(x), key, entered)
        return entered

    def _convert_entering(self, x: Tensor, dim: int | None, stack: str) -> Tensor:
        self._check_cut(x, dim, stack)
        self._tell("enter", x, dim, self._parts(dim))
        return self._bring_in(x, dim, stack)

    def _bring_in(self, x: Tensor, dim: int | None, stack: str) -> Tensor:
        if dim is None:
            return self._convert(x, "none", "sum")
        return self._convert(x, "gather", "scatter", dim, self._length(x, dim, stack))

    def leave(self, x: Tensor, dim: int | None, stack: str) -> Tensor:
        """Sum a partial value that leaves a region; keep this rank's part of ``dim``, if any."""
        self.forget()
        self._tell("leave", x, dim, 1)
        if dim is None:
            return self._convert(x, "sum", "none")
        self._note_cut(x, dim, stack)
        return self._convert(x, "scatter", "gather", dim, x.shape[dim])

    def take_columns(
        self, module: nn.Module, fqn: str, kind: LinearKind, placement: Placement
    ) -> None:
        """Compute a column-wise linear layer otherwise than its forward does, if need be."""

    def take_rows(
        self, module: nn.Module, fqn: str, kind: LinearKind, placement: Placement
    ) -> None:
        """Compute a row-wise linear layer, without its bias, otherwise."""

    def add_bias(self, output: Tensor, bias: Tensor, dim: int | None) -> Tensor:
        """Add the bias of a row-wise layer to a sum of which ``dim`` is cut, if any."""
        return output + bias

    def leave_layer(
        self, compute: Callable[[Tensor], Tensor], x: Tensor, dim: int | None, stack: str
    ) -> Tensor:
        """Sum what a layer computes of ``x`` as :meth:`leave` does, perhaps in parts."""
        divides = x.dim() > 1 and (dim is None or x.shape[dim] % self.ranks.size == 0)
        if self._beside is None or not divides:
            return self.leave(compute(x), dim, stack)
        self.forget()
        if dim is not None:
            self._note_cut(x, dim, stack)
        total = sum_in_parts(compute, x, dim, self._num_parts, self._beside)
        self._tell("leave", total, dim, self._parts(dim))
        return total

    def split(self, x: Tensor, dim: int, stack: str) -> Tensor:
        """Keep this rank's part of a whole activation."""
        length, size = x.shape[dim], self.ranks.size
        if self._even and length % size:
            raise ValueError(
                f"tensor_parallel.sequence under a pipeline needs sequences that "
                f"tensor_parallel.size ({size}) divides, got {length}; the nearest are "
                f"{length // size * size} and {(length // size + 1) * size}"
            )
        self._note_cut(x, dim, stack)
        self._tell("split", x, dim, 1)
        return self._convert(x, "keep", "gather", dim, length)

    def gather(self, x: Tensor, dim: int, stack: str) -> Tensor:
        """Put the parts of an activation together."""
        self._check_cut(x, dim, stack)
        self._cut.discard(stack)
        self._tell("gather", x, dim, self.ranks.size)
        return self._convert(x, "gather", "keep", dim, self._length(x, dim, stack))

    def share(self, part: Tensor, dim: int, length: int) -> Tensor:
        """Put the parts of a weight together that every rank uses with its own heads."""
        return self._convert(part, "gather", "scatter", dim, length)

    def gather_around(self, x: Tensor, dim: int, key: str) -> Tensor:
        """Put the parts together that a norm over them is called with."""
        return self.gather(x, dim, key)

    def split_behind(self, x: Tensor, dim: int, key: str) -> Tensor:
        """Keep this rank's part of what a norm over all of them returns."""
        return self.split(x, dim, key)

    def _note_cut(self, x: Tensor, dim: int, stack: str) -> None:
        # A program that is compiled reads what was noted before it, and writes nothing: where it
        # runs again in backward, the sequence has been gathered, and it is the same program.
        is_compiled = torch.compiler.is_compiling()
        if stack not in self.lengths or not is_compiled:
            self.lengths[stack] = x.shape[dim]
        if not is_compiled and stack in self._ends:
            self._cut.add(stack)

    def _parts(self, dim: int | None) -> int:
        return 1 if dim is None else self.ranks.size

    def _tell(
        self,
        kind: Literal["enter", "leave", "split", "gather"],
        x: Tensor,
        dim: int | None,
        num_parts: int,
    ) -> None:
        if self.listener is not None:
            self.listener(Crossing(kind, dim, num_parts * x.numel() * x.element_size()))

    def forget(self) -> None:
        """Let go of what entered last."""
        if not torch.compiler.is_compiling():  # a program holds nothing here, and lets nothing go
            self._entered = None
            self._place.forget()

    def _length(self, x: Tensor, dim: int, stack: str) -> int:
        # Noted now: backward may run when the next batch has another length.
        return self.lengths.get(stack, x.shape[dim] * self.ranks.size)

    def _convert(
        self, x: Tensor, there: Kind, back: Kind, dim: int = 0, length: int = 0
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return convert_traced(x, self._place, there, back, dim, length)
        return convert(x, self.ranks, there, back, dim, length)
