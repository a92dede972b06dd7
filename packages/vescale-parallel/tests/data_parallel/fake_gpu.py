"""A device beside the host, of memory of the CPU: what lives where, and who waits for whom.

Memory that the engine takes for the host is the host's, and so is what operators make of it; all
else is the device's. Operators on both at once raise, as on a GPU, but copies. A copy to the host
arrives when the host waits for its stream, and what reads it before raises. Until then, too, what
was copied to the device must not be written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_parallel._data_parallel import gradient_rows, planned
from vescale_parallel._parameters import flat_shards, sent_shards, shard_model
from vescale_parallel._pipeline.execution import offload


class Stream:
    """The host waits for all streams at once: copies are few, and only their order is asked."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Stream) -> None: ...

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        self._gpu.arrive()


class FakeGpu(TorchDispatchMode):
    """One rank's device and host.

    Attributes:
        log: Copies and waits of the host, in order, and what a program says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self._of_host: dict[int, StorageWeakRef] = {}
        self._arriving: list[tuple[Tensor, Tensor]] = []
        self._leaving: set[int] = set()
        self._compute, self._current = Stream(self), Stream(self)

    # What is asked of torch.cuda.
    def Stream(self) -> Any:
        return Stream(self)

    def current_stream(self) -> Any:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def take(self, tensor: Tensor) -> Tensor:
        """Have a tensor's memory be the host's."""
        if tensor.numel():
            self._of_host[_key(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def is_host(self, tensor: Tensor) -> bool:
        held = self._of_host.get(_key(tensor))
        return held is not None and not held.expired()

    def arrive(self) -> None:
        """Have the host wait."""
        self.log.append("wait")
        arriving, self._arriving = self._arriving, []
        self._leaving.clear()
        said = len(self.log)
        for target, value in arriving:
            target.copy_(value)
        del self.log[said:]  # not a copy that was asked for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(type(each).__name__ == "DTensor" for each in given):
            return NotImplemented
        given = [each for each in given if each.numel()]
        host = [each for each in given if self.is_host(each)]
        if not host:
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::copy_" and len(host) < len(given):
            return self._copy(*args, **(kwargs or {}))
        others = [each for each in given if each.dim() and not self.is_host(each)]
        assert not others, f"{name} reads memory of the host and of the device"
        arriving = {_key(target) for target, _ in self._arriving}
        if not func.is_view and name != "aten::detach":
            assert not arriving & set(map(_key, host)), f"{name} reads what has not arrived"
        for index, each in enumerate(func._schema.arguments):
            if each.is_write:
                written = args[index] if index < len(args) else (kwargs or {}).get(each.name)
                keys = {_key(leaf) for leaf in tree_leaves(written) if isinstance(leaf, Tensor)}
                assert not keys & self._leaving, f"{name} writes what is being copied"
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self.take(each)
        return made

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        how = "" if non_blocking else " and waits"
        if self.is_host(source):
            self.log.append(f"in {source.numel()}{how}")
            assert target.dtype == source.dtype or not non_blocking, "a cast makes it wait"
            # Streams copy in order: what was asked for before has arrived.
            before = {_key(held): value for held, value in self._arriving}
            target.copy_(before.get(_key(source), source))
            if non_blocking:
                self._leaving.add(_key(source))
        else:
            self.log.append(f"out {source.numel()}{how}")
            if non_blocking:
                self._arriving.append((target, source.clone()))
            else:
                target.copy_(source)
        return target


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def fake_gpus() -> Iterator[Any]:
    """Yield what makes the device of a thread, a rank: ``with gpu() as gpu: ...``."""
    of_thread = threading.local()

    def on_host(size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return of_thread.gpu.take(torch.zeros(size, dtype=dtype))

    @contextlib.contextmanager
    def gpu() -> Iterator[FakeGpu]:
        of_thread.gpu = FakeGpu()
        with of_thread.gpu:
            yield of_thread.gpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "streams_of", lambda _: of_thread.gpu)
        patch.setattr(flat_shards, "zeros_on_host", on_host)
        patch.setattr(offload, "streams_of", lambda _: of_thread.gpu)
        for module in (shard_model, sent_shards, gradient_rows, offload):
            patch.setattr(module, "empty_on_host", on_host)
        yield gpu
