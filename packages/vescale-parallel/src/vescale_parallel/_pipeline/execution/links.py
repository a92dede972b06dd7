"""Tensors on their way between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import named_failures, profiler_range
from vescale_parallel._loss.output import DTYPES
from vescale_parallel._mesh.transfers import tell_sent
from vescale_parallel._pipeline.schedules.messages import Lane, Message

_HEADER_SIZE = 10  # dtype, number of dims, up to eight sizes
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_DTYPES = (*DTYPES, *_INTEGERS, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Form:
    """What a tensor looks like.

    Attributes:
        shape: Of it.
        dtype: Likewise.
        has_grad: Whether its gradient is sent back.
    """

    shape: torch.Size
    dtype: torch.dtype
    has_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return that of a tensor."""
        return cls(tensor.shape, tensor.dtype)

    def header(self) -> Tensor:
        """Return it as a tensor of fixed size."""
        header = torch.zeros(_HEADER_SIZE, dtype=torch.int64)
        ndim = len(self.shape)
        header[0], header[1] = _DTYPES.index(self.dtype), ndim if self.has_grad else ~ndim
        header[2 : 2 + len(self.shape)] = torch.tensor(self.shape)
        return header

    @classmethod
    def from_header(cls, header: Tensor) -> Form:
        """Return what :meth:`header` was made from."""
        dtype, told, *sizes = header.tolist()
        ndim = max(told, ~told)
        return cls(torch.Size(sizes[:ndim]), _DTYPES[dtype], told >= 0)


@dataclass(frozen=True)
class Bundle:
    """The tensors of one message.

    Attributes:
        tensors: In an order that both sides know.
        has_grad: Of each, whether its gradient is sent back.
    """

    tensors: Sequence[Tensor]
    has_grad: Sequence[bool]

    @classmethod
    def of(cls, outputs: Sequence[Tensor]) -> Bundle:
        """Return what a stage sends of its outputs.

        While training one gradient is sent at least, if of nothing but zeros: its message says
        that the activations have arrived.
        """
        has_grad = [x.requires_grad for x in outputs]
        if torch.is_grad_enabled() and not any(has_grad):
            has_grad[[x.is_floating_point() or x.is_complex() for x in outputs].index(True)] = True
        return cls([x.detach() for x in outputs], has_grad)

    @property
    def forms(self) -> list[Form]:
        """What its tensors look like."""
        return [
            Form(x.shape, x.dtype, has) for x, has in zip(self.tensors, self.has_grad, strict=True)
        ]


@dataclass(eq=False)
class Links:
    """Sends and receives of one rank, over a process group for each channel.

    What a tensor looks like is not sent along: activations' is, once for each form of call, in a
    header before the first one, and their gradients look like them. A receive of which it is not
    known yet begins when it is needed.

    Attributes:
        groups: Of the channels.
        device: Where tensors arrive.
    """

    groups: Sequence[dist.ProcessGroup]
    device: torch.device
    _forms: dict[object, list[Form]] = field(default_factory=dict[object, list[Form]])
    _arriving: dict[Message, list[tuple[dist.Work, Tensor]]] = field(
        default_factory=dict[Message, list[tuple[dist.Work, Tensor]]]
    )
    _postponed: dict[Lane, list[Message]] = field(default_factory=dict[Lane, list[Message]])
    _kept: dict[Message, list[tuple[dist.Work, Tensor]]] = field(
        default_factory=dict[Message, list[tuple[dist.Work, Tensor]]]
    )

    @property
    def num_kept(self) -> int:
        """Messages that were sent and are kept."""
        return len(self._kept)

    def receive(self, message: Message, signature: object, like: Sequence[Tensor] | None) -> None:
        """Begin to receive a message.

        ``like`` are the activations whose gradients it is, if they are computed already;
        ``signature`` is what else its form depends on.
        """
        forms = self._forms_of(message, signature, like)
        waiting = self._postponed.setdefault(message.lane, [])
        # A lane's messages arrive in order.
        if forms is None or waiting:
            waiting.append(message)
        else:
            self._arriving[message] = [self._begin(message, form) for form in forms]

    def arrived(
        self,
        message: Message,
        signature: object,
        like: Sequence[Tensor] | None = None,
        num_tensors: int = 1,
    ) -> Bundle:
        """Return a message, when it is there; of activations the first one tells its form.

        ``num_tensors`` is that of a message whose form is not known.
        """
        waiting = self._postponed[message.lane]
        if message not in waiting:
            forms = self._forms_of(message, signature, like)
            assert forms is not None
            tensors = [self._wait(message, *each) for each in self._arriving.pop(message)]
            return Bundle(tensors, [form.has_grad for form in forms])
        waiting.remove(message)
        forms, tensors = self._forms_of(message, signature, like), list[Tensor]()
        if forms is None:
            forms = [self._told(message) for _ in range(num_tensors)]
            self._forms[message.stage, signature] = forms
        for form in forms:
            tensors.append(self._wait(message, *self._begin(message, form)))
        return Bundle(tensors, [form.has_grad for form in forms])

    def _told(self, message: Message) -> Form:
        header = torch.zeros(_HEADER_SIZE, dtype=torch.int64)
        return Form.from_header(self._wait(message, *self._begin(message, Form.of(header))))

    def send(self, message: Message, bundle: Bundle, signature: object) -> None:
        """Begin to send a message, the first time with what it looks like."""
        self._let_go_of_sent()
        key, parts = (message.stage, signature), [x.contiguous() for x in bundle.tensors]
        if message.lane.kind == "F":
            known, forms = self._forms.get(key), bundle.forms
            if known is None:
                self._forms[key] = forms
                parts = [*(each.header().to(self.device) for each in forms), *parts]
            elif known != forms:
                raise ValueError(_another_form(message, known, forms))
        self._kept[message] = [(self._send(message, part), part) for part in parts]

    def retire(self, message: Message) -> None:
        """Wait until a message was sent, and let go of its tensor."""
        with named_failures():
            for work, _ in self._kept.pop(message, ()):
                self.waiting(work.wait)

    def _let_go_of_sent(self) -> None:
        """Let go of what a backend that can tell says was sent."""
        for message, parts in [*self._kept.items()]:
            if all(work.is_completed() for work, _ in parts):
                del self._kept[message]

    def _forms_of(
        self, message: Message, signature: object, like: Sequence[Tensor] | None
    ) -> list[Form] | None:
        if message.lane.kind == "F":
            return self._forms.get((message.stage, signature))
        return None if like is None else [Form.of(each) for each in like]

    def _begin(self, message: Message, form: Form) -> tuple[dist.Work, Tensor]:
        into = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        with named_failures():
            group, source = self.groups[message.channel], message.lane.source
            work = dist.irecv(into, group=group, group_src=source)
        assert work is not None
        return work, into

    def _wait(self, message: Message, work: dist.Work, into: Tensor) -> Tensor:
        lane, stage = message.lane, message.stage
        sender = stage - 1 if lane.kind == "F" else stage + 1
        with profiler_range("receive over pp from stage", sender), named_failures():
            self.waiting(work.wait)
        return into

    def _send(self, message: Message, tensor: Tensor) -> dist.Work:
        lane = message.lane
        tell_sent("send activations" if lane.kind == "F" else "send gradients", tensor)
        sent = tensor.numel() * tensor.element_size()
        with profiler_range("send over pp to stage", message.stage, nbytes=sent), named_failures():
            work = dist.isend(tensor, group=self.groups[message.channel], group_dst=lane.target)
        assert work is not None
        return work

    def waiting(self, wait: Callable[[], object]) -> None:
        """Wait for another rank; tests whose ranks are threads take turns here."""
        wait()


def _another_form(message: Message, known: Sequence[Form], found: Sequence[Form]) -> str:
    pairs = zip(known, found, strict=True)
    before, now = next((a, b) for a, b in pairs if a != b)
    if (before.shape, before.dtype) == (now.shape, now.dtype):
        return (
            f"expected stage {message.stage - 1} of a pipeline to send tensors that depend on "
            f"trained parameters in every call of one form or in none, got another one of shape "
            f"{tuple(now.shape)} for micro-batch {message.microbatch}; freeze parameters on all "
            "ranks alike, or use pipeline_parallel.size 1"
        )
    return (
        f"expected stage {message.stage - 1} of a pipeline to return a tensor of "
        f"shape {tuple(before.shape)} and {before.dtype} for every batch of one shape, "
        f"got "
        f"{tuple(now.shape)} and {now.dtype} for micro-batch "
        f"{message.microbatch}; a shape that depends on values needs "
        "pipeline_parallel.size 1, or padding to one length"
    )
