"""Gathers and reductions on a stream of their own: who waits for whom, and when memory is let go.

There is no GPU here: streams that note what they are asked for stand beside tensors of a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vescale_dtensor import CollectiveWork
from vescale_parallel._data_parallel.reductions import Reduction, Reductions
from vescale_parallel._mesh.side_stream import SideStream


class Stream:
    """Knows up to which of its own and of others' operations it is ordered."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self.done = name, log, set[str]()

    def run(self, operation: str, *, after: tuple[str, ...] = ()) -> None:
        missing = [each for each in after if each not in self.done]
        assert not missing, f"{operation} on {self.name} races with {missing}"
        self.done.add(operation)
        self._log.append(f"{self.name}: {operation}")

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def record_event(self) -> frozenset[str]:
        return frozenset(self.done)

    def wait_event(self, event: frozenset[str]) -> None:
        self.done |= event


class Streams:
    """What is asked of ``torch.cuda``."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute = self._current = Stream("compute", self.log)

    def Stream(self) -> Any:
        return Stream("side", self.log)

    def current_stream(self) -> Any:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


class Work:
    """A collective on a stream of its own: who waits for it is ordered after it, not the host."""

    def __init__(self, streams: Streams, name: str, after: tuple[str, ...]) -> None:
        self._streams, self._own = streams, Stream("transfer", streams.log)
        self._own.wait_stream(streams.current_stream())
        self._own.run(name, after=after)

    def wait(self) -> None:
        self._streams.current_stream().wait_stream(self._own)


def _reduction(streams: Streams, name: str, released: list[str]) -> Reduction:
    send: Any = Work(streams, f"send {name}", (f"write {name}",))
    work: CollectiveWork = send
    yield work
    streams.current_stream().run(f"sum {name}", after=(f"send {name}",))
    yield None
    released.append(name)


def test_a_reduction_is_under_compute_until_the_next_one_and_its_memory_is_kept_until_then() -> (
    None
):
    streams, released = Streams(), list[str]()
    reductions = Reductions(stream=SideStream(streams))
    for name, before in (("a", []), ("b", ["a"])):
        streams.compute.run(f"write {name}")
        reductions.advance()
        assert released == before
        reductions.start(_reduction(streams, name, released))
        # All of it was asked for, on other streams, and compute is not held up by it.
        assert f"sum {name}" not in streams.compute.done
        streams.compute.run(f"backward after {name}")
    assert streams.log[:4] == [
        "compute: write a", "transfer: send a", "side: sum a", "compute: backward after a",
    ]  # fmt: skip
    reductions.finish()
    assert released == ["a", "b"]
    streams.compute.run("optimizer", after=("sum a", "sum b", "send a", "send b"))


def test_what_a_failed_pass_left_is_waited_for_before_its_memory_is_used_again() -> None:
    streams, released = Streams(), list[str]()
    reductions = Reductions(stream=SideStream(streams))
    streams.compute.run("write a")
    reductions.start(_reduction(streams, "a", released))
    reductions.abandon()
    streams.compute.run("write a again", after=("send a", "sum a"))
    reductions.finish()
    assert not released


def test_a_section_is_ordered_after_compute_and_runs_at_once_without_streams() -> None:
    streams = Streams()
    side = SideStream(streams)
    streams.compute.run("update shards")
    with side.section():
        streams.current_stream().run("pack", after=("update shards",))
    streams.compute.run("forward")
    assert "pack" not in streams.compute.done
    side.join(side.mark())
    streams.compute.run("unpack", after=("pack",))
    none = SideStream(None)
    with none.section():
        pass
    none.join(none.mark())


@pytest.mark.gpu
def test_a_section_overlaps_with_compute_on_a_gpu() -> None:
    side = SideStream(torch.cuda)
    x = torch.ones(1 << 22, device="cuda")
    main = torch.cuda.current_stream()
    with side.section():
        assert torch.cuda.current_stream() != main
        y = x * 2
    assert torch.cuda.current_stream() == main
    side.join(side.mark())
    assert bool((y == 2).all())
