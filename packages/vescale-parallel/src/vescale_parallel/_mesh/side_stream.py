"""The stream that a GPU communicates on while it computes.

[Note: streams] A section on the side stream begins after what compute was asked to do so far:
shards are updated then, gradients written. Compute waits for the section before it reads what the
section wrote, and before memory is used again that the section read or wrote; :class:`.Reductions`
and :class:`.Gathering` hold on to that memory until then. So the allocator needs to be told
nothing: memory of compute's stream is given back and used again in the order of that stream. What
a section itself allocates was given back, if it was used before, by compute that the section
waited for.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What is asked of ``torch.cuda``."""

    def Stream(self) -> Any: ...

    def current_stream(self) -> Any: ...

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]: ...


class SideStream:
    """A stream beside the one that computes, made when it is first needed.

    Args:
        streams: Those of the device; None where there are none, and sections run at once.
        copies_host: Whether sections copy memory of the host; see [Note: memory of the host].
    """

    def __init__(self, streams: Streams | None, *, copies_host: bool = False) -> None:
        self._streams, self._stream, self._copies_host = streams, None, copies_host

    @property
    def exists(self) -> bool:
        """Whether sections run beside compute."""
        return self._streams is not None

    def section(self) -> contextlib.AbstractContextManager[None]:
        """Return a block whose operators run on the stream, after all that compute has so far."""
        if self._streams is None:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = self._streams.Stream()
        self._stream.wait_stream(self._streams.current_stream())
        return self._streams.stream(self._stream)

    def mark(self) -> Any:
        """Return an event after all that sections have so far."""
        return None if self._stream is None else self._stream.record_event()

    def settle(self) -> None:
        """Have the host wait for all that sections have so far, if they copy memory of its."""
        if self._copies_host and self._stream is not None:
            self._stream.synchronize()

    def join(self, event: Any) -> None:
        """Have compute wait for an event."""
        if self._streams is not None and event is not None:
            self._streams.current_stream().wait_event(event)


def streams_of(device_type: str) -> Streams | None:
    """Return the streams of a type of device, None if collectives on it are the host's."""
    return torch.cuda if device_type == "cuda" else None
