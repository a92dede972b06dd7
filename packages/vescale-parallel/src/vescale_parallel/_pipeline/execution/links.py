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


@dataclass(frozen=True)
class Form:
    """What a tensor looks like."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return that of a tensor."""
        return cls(tensor.shape, tensor.dtype)

    def header(self) -> Tensor:
        """Return it as a tensor of fixed size."""
        header = torch.zeros(_HEADER_SIZE, dtype=torch.int64)
        header[0], header[1] = DTYPES.index(self.dtype), len(self.shape)
        header[2 : 2 + len(self.shape)] = torch.tensor(self.shape)
        return header

    @classmethod
    def from_header(cls, header: Tensor) -> Form:
        """Return what :meth:`header` was made from."""
        dtype, ndim, *sizes = header.tolist()
        return cls(torch.Size(sizes[:ndim]), DTYPES[dtype])


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
    _forms: dict[object, Form] = field(default_factory=dict[object, Form])
    _arriving: dict[Message, tuple[dist.Work, Tensor]] = field(
        default_factory=dict[Message, tuple[dist.Work, Tensor]]
    )
    _postponed: dict[Lane, list[Message]] = field(default_factory=dict[Lane, list[Message]])
    _kept: dict[Message, list[tuple[dist.Work, Tensor]]] = field(
        default_factory=dict[Message, list[tuple[dist.Work, Tensor]]]
    )

    @property
    def num_kept(self) -> int:
        """Messages that were sent and are kept."""
        return len(self._kept)

    def receive(self, message: Message, signature: object, like: Tensor | None) -> None:
        """Begin to receive a message.

        ``like`` is the activation whose gradient it is, if that is computed already;
        ``signature`` is what else its form depends on.
        """
        form = self._form(message, signature, like)
        waiting = self._postponed.setdefault(message.lane, [])
        # A lane's messages arrive in order.
        if form is None or waiting:
            waiting.append(message)
        else:
            self._arriving[message] = self._begin(message, form)

    def arrived(self, message: Message, signature: object, like: Tensor | None) -> Tensor:
        """Return a message, when it is there."""
        waiting = self._postponed[message.lane]
        if message in waiting:
            waiting.remove(message)
            form = self._form(message, signature, like)
            if form is None:
                header = torch.zeros(_HEADER_SIZE, dtype=torch.int64)
                header = self._wait(message, *self._begin(message, Form.of(header)))
                form = self._forms[message.stage, signature] = Form.from_header(header)
            self._arriving[message] = self._begin(message, form)
        return self._wait(message, *self._arriving.pop(message))

    def send(self, message: Message, tensor: Tensor, signature: object) -> None:
        """Begin to send a message, the first time with what it looks like."""
        self._let_go_of_sent()
        key, parts = (message.stage, signature), [tensor.contiguous()]
        if message.lane.kind == "F":
            known = self._forms.get(key)
            if known is None:
                self._forms[key] = Form.of(tensor)
                parts.insert(0, Form.of(tensor).header().to(tensor.device))
            elif known != Form.of(tensor):
                raise ValueError(
                    f"expected stage {message.stage - 1} of a pipeline to return a tensor of "
                    f"shape {tuple(known.shape)} and {known.dtype} for every batch of one shape, "
                    f"got "
                    f"{tuple(tensor.shape)} and {tensor.dtype} for micro-batch "
                    f"{message.microbatch}; a shape that depends on values needs "
                    "pipeline_parallel.size 1, or padding to one length"
                )
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

    def _form(self, message: Message, signature: object, like: Tensor | None) -> Form | None:
        if message.lane.kind == "F":
            return self._forms.get((message.stage, signature))
        return None if like is None else Form.of(like)

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
        with profiler_range("send over pp to stage", message.stage), named_failures():
            work = dist.isend(tensor, group=self.groups[message.channel], group_dst=lane.target)
        assert work is not None
        return work

    def waiting(self, wait: Callable[[], object]) -> None:
        """Wait for another rank; tests whose ranks are threads take turns here."""
        wait()
