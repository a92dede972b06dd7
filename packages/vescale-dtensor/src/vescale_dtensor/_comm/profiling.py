"""Names for people: ranges in a profile, and the axes that process groups stand for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from vescale_dtensor._caches import forget_with_world, notice_world, own_list
from vescale_dtensor._torch_private import is_profiler_enabled

from .groups import Peers

_NO_RANGE = contextlib.nullcontext()
# Nsight Systems sets it for the programs it runs, which do not notice it in any other way.
_UNDER_NSYS = "NSYS_PROFILING_SESSION_ID" in os.environ
_PREFIX = "mesh_"  # of the descriptions that torch gives to the groups of a mesh

_names: dict[str, str] = {}
forget_with_world(_names.clear)

# Called with the words of a range and its bytes as it begins; returns what is called at its end.
RangeListener = Callable[[tuple[object, ...], int], Callable[[], None]]
_listeners: list[RangeListener] = []
own_list(_listeners)


@contextlib.contextmanager
def listening_to_ranges(listener: RangeListener) -> Iterator[None]:
    """Call ``listener`` for every range of this rank inside the block, profiler or not.

    Args:
        listener: Called as a range begins, with the words of its name and, for what is sent from
            rank to rank, the bytes; returns what is called when the range ends.

    Example:
        >>> seen = []
        >>> with listening_to_ranges(lambda words, nbytes: lambda: seen.append(words)):
        ...     with profiler_range("load", "shard", 3):
        ...         pass
        >>> seen
        [('load', 'shard', 3)]
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Have profiles and counters call a process group by a name, such as a mesh axis.

    The groups of a mesh with more than one axis are called by their axes anyway.

    Args:
        group: Any process group.
        name: What to call it.
    """
    notice_world()  # or the name is forgotten with those of the job before
    _names[group.group_name] = name


def name_of(peers: Peers) -> str:
    """Return the axes that ranks are along, or what is known of their group."""
    if peers.mesh is not None:
        names = peers.mesh.mesh_dim_names
        return "+".join(str(axis) if names is None else names[axis] for axis in peers.axes)
    if peers.group is None:
        return "group"
    known = _names.get(peers.group.group_name)
    if known is not None:
        return known
    described = peers.group.group_desc
    return described.removeprefix(_PREFIX) if described.startswith(_PREFIX) else "group"


def is_profiled() -> bool:
    """Whether a profiler of torch, Nsight Systems or a listener would see a range."""
    return bool(_listeners) or is_profiler_enabled() or _takes_nvtx()


def _takes_nvtx() -> bool:
    # Without a GPU torch has no NVTX.
    return _UNDER_NSYS and torch.cuda.is_initialized()


def profiler_range(*words: object, nbytes: int = 0) -> contextlib.AbstractContextManager[object]:
    """Return a range that profilers show by a name; it does nothing while none runs.

    It is a ``torch.profiler.record_function``, and under Nsight Systems an NVTX range. One that
    ends on another thread than it began on is missing in profiles of torch 2.11.

    Args:
        *words: The name; joined only if a profiler runs.
        nbytes: Sent inside of it from this rank to another, for :func:`listening_to_ranges`.

    Example:
        >>> with torch.profiler.profile() as profile, profiler_range("load", "shard", 3):
        ...     _ = torch.ones(2) + 1
        >>> "vescale: load shard 3" in {event.key for event in profile.key_averages()}
        True
    """
    if not is_profiled():
        return _NO_RANGE
    return _Range(words, nbytes)


def collective_range(kind: str, peers: Peers) -> contextlib.AbstractContextManager[object]:
    """Return a range for a collective, named after its axis."""
    return profiler_range(kind, "over", name_of(peers)) if is_profiled() else _NO_RANGE


class _Range:
    """A range of whatever profilers run. It may end on another thread than it began."""

    def __init__(self, words: tuple[object, ...], nbytes: int) -> None:
        self._words, self._nbytes = words, nbytes
        self._record: torch.profiler.record_function | None = None
        self._nvtx: object = None
        self._ends: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        is_recorded, takes_nvtx = is_profiler_enabled(), _takes_nvtx()
        if is_recorded or takes_nvtx:
            name = f"vescale: {' '.join(map(str, self._words))}"
            if is_recorded:
                self._record = torch.profiler.record_function(name)
                self._record.__enter__()
            if takes_nvtx:
                self._nvtx = torch.cuda.nvtx.range_start(name)
        self._ends = [listener(self._words, self._nbytes) for listener in _listeners]

    def __exit__(self, *problem: object) -> None:
        for end in self._ends:
            end()
        if self._record is not None:
            self._record.__exit__(None, None, None)
        if self._nvtx is not None:
            torch.cuda.nvtx.range_end(self._nvtx)
