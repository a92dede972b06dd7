"""What autograd keeps of micro-batches that wait for their backward, in memory of the host.

[Note: activations on the host] While a stage runs forward, each memory that autograd saves a
tensor of is copied to the host on a stream of its own, once and as a whole: views, strides and
what shares it stay as they are. Parameters and buffers stay, for they are there anyway. The
device's memory is let go of behind the next pass, so that compute need not wait for the copies;
writes to it until then are refused, as autograd refuses them. Backward first asks for all copies
back, for those of what was saved last first, and waits for each where it is used.

Where ranks compute on CPUs nothing would be saved, and nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from vescale_parallel._mesh.side_stream import SideStream, streams_of
from vescale_parallel._parameters.host_memory import empty_on_host

_LEAST_NBYTES = 512  # less is not worth a copy


@dataclass(eq=False)
class _Stays:
    """A saved tensor that stays where it is, with the number of writes to it of then."""

    tensor: Tensor
    version: int

    def checked(self) -> Tensor:
        # Autograd does not look at tensors that hooks have packed.
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{self.tensor._version}, expected version {self.version}"
            )
        return self.tensor


@dataclass(eq=False)
class _Memory:
    """A memory that tensors were saved of: on the host, and while it is on the device.

    Attributes:
        on_host: Its bytes.
        device: Where it was.
        original: A tensor of it, None when it was let go of.
        back: Its bytes, on the device again.
        arrived: When they are there.
    """

    on_host: Tensor
    device: torch.device
    original: _Stays | None
    back: Tensor | None = None
    arrived: Any = None


@dataclass(eq=False)
class _View:
    """A saved tensor, as a view of a memory."""

    memory: _Memory
    dtype: torch.dtype
    place: tuple[int, torch.Size, tuple[int, ...]]

    def of(self, memory: Tensor) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), *self.place)


@dataclass(eq=False)
class _Saved:
    """What was saved in one pass, in order, and when all of it is on the host."""

    memories: dict[tuple[int, int], _Memory] = field(
        default_factory=dict[tuple[int, int], _Memory]
    )
    copied: Any = None

    def check(self) -> None:
        for memory in self.memories.values():
            if memory.original is not None:
                memory.original.checked()


@dataclass(eq=False)
class ActivationsOnHost:
    """Has the passes of one rank wait with what autograd saved on the host.

    Attributes:
        stream: That copies.
        stays: Returns tensors whose memory stays: parameters and buffers.
    """

    stream: SideStream
    stays: Callable[[], Iterable[Tensor]] = tuple
    _saved: dict[object, _Saved] = field(default_factory=dict[object, _Saved])
    _leaving: list[_Saved] = field(default_factory=list[_Saved])

    def begin(self) -> None:
        """Forget what a step that failed has left."""
        self._saved.clear()
        self._leaving.clear()

    @contextlib.contextmanager
    def saving(self, key: object) -> Iterator[None]:
        """Copy what is saved in here; ``key`` names the pass."""
        if not self.stream.exists:
            yield
            return
        saved = self._saved[key] = _Saved()
        staying = {each.untyped_storage()._cdata for each in self.stays()}

        def pack(tensor: Tensor) -> _View | _Stays:
            return self._packed(tensor, saved, staying)

        with saved_tensors_hooks(pack, self._unpacked):
            yield
        saved.copied = self.stream.mark()

    def let_go(self, ran: object) -> None:
        """Free what passes before the one that just ran have copied to the host."""
        for saved in self._leaving:
            saved.check()
            # Compute uses the memory again.
            self.stream.join(saved.copied)
            for memory in saved.memories.values():
                memory.original = None
        self._leaving = [self._saved[ran]] if ran in self._saved else []

    def fetch(self, key: object) -> None:
        """Ask for what was saved in a pass, which runs backward now."""
        saved = self._saved.get(key)
        if saved is None:
            return
        for memory in reversed(saved.memories.values()):
            if memory.original is None and memory.back is None:
                self._bring_back(memory)

    def forget(self, key: object) -> None:
        """Let go of a pass whose backward is done."""
        self._saved.pop(key, None)

    def _packed(self, tensor: Tensor, saved: _Saved, staying: set[int]) -> _View | _Stays:
        # Not the tensor itself, whose graph would hold it.
        stays = _Stays(tensor.detach(), tensor._version)
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return stays
        storage = tensor.untyped_storage()
        if storage._cdata in staying or storage.nbytes() < _LEAST_NBYTES:
            return stays
        key = storage._cdata, tensor._version
        memory = saved.memories.get(key)
        if memory is None:
            memory = saved.memories[key] = _Memory(self._copied(tensor), tensor.device, stays)
        place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return _View(memory, tensor.dtype, place)

    def _copied(self, tensor: Tensor) -> Tensor:
        """Begin to copy the memory of a tensor to the host."""
        storage = tensor.untyped_storage()
        size, device = torch.Size([storage.nbytes()]), tensor.device
        on_host = empty_on_host(size, dtype=torch.uint8, device=device)
        whole = torch.empty(0, dtype=torch.uint8, device=device)
        whole.set_(storage, 0, size, (1,))
        with self.stream.section():
            on_host.copy_(whole, non_blocking=True)
        return on_host

    def _bring_back(self, memory: _Memory) -> None:
        with self.stream.section():
            size = memory.on_host.numel()
            memory.back = torch.empty(size, dtype=torch.uint8, device=memory.device)
            memory.back.copy_(memory.on_host, non_blocking=True)
        memory.arrived = self.stream.mark()

    def _unpacked(self, packed: _View | _Stays) -> Tensor:
        if isinstance(packed, _Stays):
            return packed.checked()
        memory = packed.memory
        if memory.original is not None:
            return packed.of(memory.original.checked())
        if memory.back is None:  # a backward that nobody announced
            self._bring_back(memory)
        assert memory.back is not None
        self.stream.join(memory.arrived)
        return packed.of(memory.back)


def activations_on_host(
    device: torch.device, stays: Callable[[], Iterable[Tensor]]
) -> ActivationsOnHost:
    """Return what keeps activations of a device on the host; nothing is done for a CPU."""
    return ActivationsOnHost(SideStream(streams_of(device.type)), stays)
