"""What one process drew from when it recorded a construction, for another that recorded the same.

Two processes that run one constructor record the same operators, but their generators may have
been seeded differently. What is taken over is where the generators were, and the tensors that
constructors bring along; it is small and can be pickled, whatever the size of the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vescale_dtensor.random import PhiloxDraws, Point, Stream, Window, philox_draws

from ._evaluation.replay import needed_writes
from ._module_tensors import all_tensors
from ._tape.deferred_tensor import DeferredTensor
from ._tape.tape import Write
from ._torch_private import plainly, tree_leaves


@dataclass(frozen=True, slots=True)
class _Place:
    """A :class:`Point`, with its stream by number."""

    stream: int
    num_draws: int
    spare: _Place | Tensor | None


@dataclass(frozen=True, slots=True)
class RecordedDraws:
    """What :func:`recorded_draws` returns: means something to :func:`replace_draws` alone."""

    streams: tuple[Tensor, ...]
    places: tuple[_Place | Tensor | None, ...]
    constants: tuple[Tensor, ...]


def recorded_draws(module: nn.Module) -> RecordedDraws:
    """Return what the values of a deferred module are drawn from, as of now.

    Args:
        module: Not materialised yet.

    Example:
        >>> from vescale_deferred import deferred_init
        >>> recorded = recorded_draws(deferred_init(nn.Linear, 4, 3))
    """
    streams: dict[Stream, int] = {}

    def place(point: Point | Tensor | None) -> _Place | Tensor | None:
        if not isinstance(point, Point):
            return point
        stream = streams.setdefault(point.stream, len(streams))
        return _Place(stream, point.num_draws, place(point.spare))

    with plainly():
        writes = _writes(module)
        places = tuple(place(write.point) for write in writes)
        states = tuple(stream.state(0) for stream in streams)
        return RecordedDraws(states, places, tuple(_constants(writes)))


def replace_draws(module: nn.Module, draws: RecordedDraws) -> None:
    """Have a deferred module draw what another process would, in place.

    If both recorded the same operators on tensors of the same shapes, their values, and their
    :func:`fingerprint`, are the same afterwards. Otherwise nothing is changed.

    Args:
        module: Not materialised yet.
        draws: What :func:`recorded_draws` returned in the other process.

    Example:
        >>> import torch
        >>> from vescale_deferred import deferred_init, read
        >>> one, other = deferred_init(nn.Linear, 4, 3), deferred_init(nn.Linear, 4, 3)
        >>> replace_draws(other, recorded_draws(one))
        >>> torch.equal(read(one.weight), read(other.weight))
        True
    """
    with plainly():
        writes = _writes(module)
        if not _fits(draws, writes):
            return
        streams = [Stream(state) for state in draws.streams]
        for write, place in zip(writes, draws.places, strict=True):
            if place is not None:
                _move(write, _point(place, streams))
        for own, constant in zip(_constants(writes), draws.constants, strict=True):
            own.copy_(constant)


def _writes(module: nn.Module) -> list[Write]:
    tensors = [tensor for _, tensor in all_tensors(module)]
    return needed_writes(t.deferral.snapshot() for t in tensors if isinstance(t, DeferredTensor))


def _constants(writes: list[Write]) -> list[Tensor]:
    leaves = [leaf for write in writes for leaf in tree_leaves((write.args, write.kwargs))]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _fits(draws: RecordedDraws, writes: list[Write]) -> bool:
    kinds = [(place is None, isinstance(place, Tensor)) for place in draws.places]
    befores = [write.point for write in writes]
    if kinds != [(before is None, isinstance(before, Tensor)) for before in befores]:
        return False
    theirs = [(constant.shape, constant.dtype) for constant in draws.constants]
    return theirs == [(constant.shape, constant.dtype) for constant in _constants(writes)]


def _point(place: _Place | Tensor, streams: list[Stream]) -> Point | Tensor:
    if isinstance(place, Tensor):
        return place
    spare = None if place.spare is None else _point(place.spare, streams)
    return Point(streams[place.stream], place.num_draws, spare)


def _move(write: Write, before: Point | Tensor) -> None:
    """Put the generator of a recorded operator somewhere else."""
    changed: dict[str, Any] = {"point": before}
    if isinstance(write.draws, PhiloxDraws):
        assert isinstance(before, Tensor)
        old = write.draws
        changed["draws"] = philox_draws(old.fill, _drawn(write), before, old.kernels)
    for name, value in changed.items():
        # The entries of all tapes that it wrote to hold this very write.
        object.__setattr__(write, name, value)


def _drawn(write: Write) -> Window:
    return next(filter(None, (*write.mutated, *write.outputs))).window
