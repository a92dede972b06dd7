"""Did two processes record the same construction? Compare one short string."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor.random import PhiloxDraws, Point, Stream, Window

from ._evaluation.replay import needed_writes
from ._module_tensors import all_tensors
from ._tape.deferred_tensor import DeferredTensor
from ._tape.tape import Snapshot, Tape, Write
from ._torch_private import plainly, tree_flatten

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def fingerprint(module: nn.Module) -> str:
    """Return what is equal on two ranks if materialising gives them the same module.

    It covers the names and geometry of all tensors, and of the deferred ones every operator
    their values depend on, its arguments, and the seed and place of each random number. Nothing
    is drawn. Real tensors count with their values; if they are of a subclass, sparse or without
    memory, with their geometry only. Nobody communicates: gather the strings and compare them.

    The string means nothing to another version of this package or of torch.

    Args:
        module: Not materialised yet: shards differ from rank to rank.

    Example:
        >>> from vescale_deferred import deferred_init
        >>> def layer(seed):
        ...     torch.manual_seed(seed)
        ...     return fingerprint(deferred_init(nn.Linear, 4, 3))
        >>> layer(1) == layer(1), layer(1) == layer(2)
        (True, False)
    """
    return _digest(all_tensors(module))


def fingerprints(module: nn.Module) -> dict[str, str]:
    """Return a :func:`fingerprint` of each tensor, by its first name: to say which one differs.

    A tensor that is no parameter or buffer goes by a number. Takes longer than one fingerprint,
    as tensors may depend on the same operators.

    Args:
        module: Not materialised yet.

    Example:
        >>> from vescale_deferred import deferred_init
        >>> list(fingerprints(deferred_init(nn.Linear, 4, 3)))
        ['weight', 'bias']
    """
    found: dict[str, str] = {}
    for number, (fqn, tensor) in enumerate(all_tensors(module)):
        found[fqn or f"attribute {number}"] = _digest([(fqn, tensor)])
    return found


def _digest(named: list[tuple[str, Tensor]]) -> str:
    digest = _Digest()
    with plainly():
        snapshots = [t.deferral.snapshot() for _, t in named if isinstance(t, DeferredTensor)]
        for write in needed_writes(snapshots):
            digest.write(write)
        for fqn, tensor in named:
            digest.tensor(fqn, tensor)
    return digest.hexdigest()


class _Digest:
    """Takes in tensors and writes, and calls storages and streams by the order they come in."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._tapes: dict[Tape, int] = {}
        self._streams: dict[Stream, str] = {}
        self._objects: dict[int, int] = {}

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:32]

    def write(self, write: Write) -> None:
        """Take in one operator call."""
        leaves, structure = tree_flatten((write.args, write.kwargs))
        self._add(str(write.func), str(structure), str(write.default_dtype))
        for leaf in (*leaves, *write.outputs, *write.mutated):
            self._leaf(leaf)
        self._point(write.point)
        if isinstance(write.draws, PhiloxDraws):
            self._add(str(write.draws.grid))

    def tensor(self, fqn: str, tensor: Tensor) -> None:
        """Take in a tensor of the module."""
        same_as = self._objects.setdefault(id(tensor), len(self._objects))
        kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
        self._add(fqn, str(same_as), kind, str(tensor.requires_grad))
        self._leaf(tensor.deferral.snapshot() if isinstance(tensor, DeferredTensor) else tensor)

    def _add(self, *words: str) -> None:
        self._hash.update("\0".join((*words, "\n")).encode())

    def _leaf(self, leaf: Any) -> None:
        match leaf:
            case Snapshot():
                ordinal = self._tapes.setdefault(leaf.tape, len(self._tapes))
                nbytes, device = leaf.tape.nbytes, leaf.tape.device.type
                self._add("deferred", f"{ordinal} {nbytes} {device} {leaf.window}")
            case Tensor():
                self._real(leaf)
            case torch.device():  # ranks of one host differ in the index
                self._add("device", leaf.type)
            case _:
                self._add(type(leaf).__name__, repr(leaf))

    def _real(self, tensor: Tensor) -> None:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
            self._add(type(tensor).__name__, f"{tuple(tensor.shape)} {tensor.dtype}")
            return
        self._add("real", f"{Window.of(tensor)} {tensor.device.type}")
        packed = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if packed.numel():
            memory = (ctypes.c_char * packed.nbytes).from_address(packed.data_ptr())
            self._hash.update(memory)

    def _point(self, point: Point | Tensor | None) -> None:
        """Take in where a generator was, or the spare normal that it kept."""
        if not isinstance(point, Point):
            self._leaf(point)
            return
        if point.stream not in self._streams:
            self._streams[point.stream] = point.stream.digest()
        self._add(self._streams[point.stream], str(point.num_draws))
        self._point(point.spare)
