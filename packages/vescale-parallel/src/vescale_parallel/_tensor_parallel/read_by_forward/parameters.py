"""What a module's own forward finds in place of its parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate

from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.chunks import parts_of
from vescale_parallel._tensor_parallel.conversions import Boundary


@contextlib.contextmanager
def replaced(module: nn.Module, values: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Have a module's own forward, whatever it computes, find other values for a while."""
    held: Any = {name: module._parameters.get(name) for name in values}
    parameters: Any = module._parameters
    parameters.update(values)
    try:
        yield
    finally:
        parameters.update(held)


def add_on_first_rank(module: nn.Module, names: Sequence[str], rank: int) -> None:
    """Have forward find zeros on all ranks but the first, for parameters that are added to sums.

    What forward makes of them is summed over ranks, linearly, so that the gradient of that sum,
    which every rank gets whole, is every rank's gradient of the parameter: none is communicated.
    """
    if rank == 0:
        return
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        held = {name: module._parameters[name] for name in names}
        zeros = {n: None if p is None else _as_zeros(p) for n, p in held.items()}
        with replaced(module, zeros):
            return own(*args, **kwargs)

    module.forward = forward


@dataclass(frozen=True)
class ReadParts:
    """A sharded parameter of which forward reads some parts whole.

    Attributes:
        placement: Of the parameter.
        parts: Of each of its parts, as forward reads it: sharded, or replicated. Empty if all are
            sharded.
    """

    placement: Placement
    parts: Sequence[Placement]

    def local_lengths(self, total: int, size: int) -> list[int]:
        """Return the lengths of a rank's shards of the parts, ``total`` long together."""
        parts = parts_of(self.placement)
        if isinstance(parts, tuple):
            return [length // size for length in parts]
        return [total // parts] * parts

    def read_lengths(self, total: int, size: int) -> list[int]:
        """Return the lengths of the parts that forward reads on a rank."""
        local = self.local_lengths(total, size)
        if not self.parts:
            return local
        pairs = zip(local, self.parts, strict=True)
        return [length * size if each == Replicate() else length for length, each in pairs]


def read_parts(module: nn.Module, names: Mapping[str, ReadParts], boundary: Boundary) -> None:
    """Have forward find some parts of parameters whole, named from the module; of buffers its own.

    Every rank uses all of such a part, for its own heads: ranks' shards of it are all-gathered,
    and in backward its gradients, which are partial, reduce-scattered.
    """
    kind, size = linear_kind(module), boundary.ranks.size
    if kind is not None and "weight" in names:
        total: int = getattr(module, kind.out_attribute)
        setattr(module, kind.out_attribute, sum(names["weight"].read_lengths(total, size)))
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name, read in names.items():
                owner_fqn, _, last = name.rpartition(".")
                owner = module.get_submodule(owner_fqn)
                if last in owner._buffers:
                    buffer = owner._buffers[last]
                    assert buffer is not None
                    stack.enter_context(_sliced(owner, last, _own(buffer, read, boundary)))
                    continue
                held = owner._parameters.get(last)
                assert held is not None
                stack.enter_context(replaced(owner, {last: _gathered(held, read, boundary)}))
            return own(*args, **kwargs)

    module.forward = forward


@contextlib.contextmanager
def _sliced(module: nn.Module, name: str, part: Tensor) -> Iterator[None]:
    """Have a module's own forward find a part of a buffer for a while."""
    held = module._buffers[name]
    module._buffers[name] = part
    version = _version(part)
    try:
        yield
        if _version(part) != version:
            raise RuntimeError(
                f"forward of {type(module).__name__} writes to buffer {name!r}, of which "
                "tensor-parallel ranks read parts; leave <read> out of the sharding plan"
            )
        if module._buffers[name] is not part:
            raise RuntimeError(
                f"forward of {type(module).__name__} assigns buffer {name!r}, of which "
                "tensor-parallel ranks read parts; leave <read> out of the sharding plan"
            )
    finally:
        module._buffers[name] = held


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written, where that is counted."""
    is_counted = not (torch.compiler.is_compiling() or tensor.is_inference())
    return tensor._version if is_counted else 0


def _own(buffer: Tensor, read: ReadParts, boundary: Boundary) -> Tensor:
    """Return what a rank reads of a whole buffer."""
    dim: int = getattr(read.placement, "dim", 0)
    ranks, parts = boundary.ranks, parts_of(read.placement)
    if not isinstance(parts, tuple):
        parts = (buffer.shape[dim] // parts,) * parts
    read_as = read.parts if len(read.parts) == len(parts) else [read.placement] * len(parts)
    found = [
        part if each == Replicate() else part.chunk(ranks.size, dim)[ranks.rank]
        for part, each in zip(buffer.split(list(parts), dim), read_as, strict=True)
    ]
    return torch.cat(found, dim)


def _gathered(held: Tensor, read: ReadParts, boundary: Boundary) -> Tensor:
    dim: int = getattr(read.placement, "dim", 0)
    size, total = boundary.ranks.size, held.shape[dim]
    shards = held.split(read.local_lengths(total, size), dim)
    whole = read.read_lengths(total, size)
    found = [
        boundary.share(shard, dim, length) if each == Replicate() else shard
        for shard, length, each in zip(shards, whole, read.parts, strict=True)
    ]
    return torch.cat(found, dim)


def _as_zeros(parameter: Tensor) -> Tensor:
    # Zeros, whose gradient is the parameter's. A torch.autograd.Function is no part of a graph.
    return parameter - parameter.detach()
