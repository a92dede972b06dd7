"""The tape of a storage that does not exist yet: what was written to it, in order.

A deferred tensor is a window on a :class:`Tape`, as an ordinary tensor is a window on a
storage. Operators append to tapes and never look at values; a read goes back from the last
write to those writes it depends on. Views need no entry: they are other windows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vescale_deferred._torch_private import OpOverload, storage_key, tree_leaves
from vescale_dtensor.random import Draws, PhiloxDraws, Point, Window

_next_index = itertools.count()


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operator and its arguments, deferred tensors among them."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True, eq=False)
class Tape:
    """The recorded writes to one storage, in order.

    Attributes:
        meta: A tensor on the meta device whose storage stands for this one.
        device: Where the storage would be.
        entries: What was written; only ever appended to.
        fqn: The first name of a tensor on it in the module that was deferred.
        storage: The real one, once ``materialize`` has made it.
    """

    meta: Tensor
    device: torch.device
    entries: list[Entry] = field(default_factory=list["Entry"])
    fqn: str | None = None
    storage: torch.UntypedStorage | None = None

    @property
    def nbytes(self) -> int:
        """Size of the storage."""
        return self.meta.untyped_storage().nbytes()

    @property
    def key(self) -> int:
        """Identifies the storage among those alive."""
        return storage_key(self.meta)

    @property
    def version(self) -> int:
        """Number of writes so far."""
        return len(self.entries)

    def last_cover(self, version: int) -> int:
        """Return the first of the entries that make up the content at ``version``."""
        for index in range(version - 1, -1, -1):
            if self.entries[index].covers:
                return index
        return 0

    def fork(self) -> Tape:
        """Return a tape that begins with a copy of what is in this one."""
        copy = Tape(torch.empty_like(self._flat()), self.device)
        flat = Window.of(copy.meta)
        snapshot = Snapshot(self, self.version, flat)
        clone = torch.ops.aten.clone.default
        Write(clone, (snapshot,), outputs=(Snapshot(copy, 0, flat),)).enter()
        return copy

    def _flat(self) -> Tensor:
        storage = self.meta.untyped_storage()
        numel = storage.nbytes() // self.meta.dtype.itemsize
        return Window((numel,), (1,), 0, self.meta.dtype).on(storage)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A deferred tensor as an operator found it: a window on a version of a tape."""

    tape: Tape
    version: int
    window: Window


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One operator call, recorded.

    Attributes:
        func: The operator; None if the outputs are the constants in ``args``.
        args: Its arguments, with a :class:`Snapshot` or a private copy for every tensor.
        kwargs: Likewise.
        outputs: The new tensors it returned, flat; None for what is not recorded.
        mutated: The arguments it wrote to.
        overwrites: Whether the result does not depend on what was in the mutated tapes.
        point: Where the generator was, for a random operator; its state if it is one of CUDA.
        draws: What a random operator draws, if that is known.
        default_dtype: torch's default at the time.
        index: Orders all writes of the process.
    """

    func: OpOverload | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    outputs: tuple[Snapshot | None, ...] = ()
    mutated: tuple[Snapshot, ...] = ()
    overwrites: bool = True
    point: Point | Tensor | None = None
    draws: Draws | PhiloxDraws | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    index: int = field(default_factory=lambda: next(_next_index))

    def arguments(self) -> list[Snapshot]:
        """Return all deferred tensors among the arguments."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Snapshot)]

    def reads(self) -> list[Snapshot]:
        """Return the deferred tensors whose values the operator needs."""
        written = {out.tape for out in self.mutated} if self.overwrites else ()
        return [snapshot for snapshot in self.arguments() if snapshot.tape not in written]

    def tapes(self) -> set[Tape]:
        """Return all tapes that the operator reads or writes."""
        return {snapshot.tape for snapshot in (*self.arguments(), *filter(None, self.outputs))}

    def enter(self) -> None:
        """Append the write to the tapes it changed."""
        for out in (*filter(None, self.outputs), *self.mutated):
            covers = self.overwrites and out.window.covers(out.tape.nbytes)
            out.tape.entries.append(Entry(self, out.window, covers))


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What a write did to one tape.

    Attributes:
        write: The operator call.
        window: The part of the storage it wrote.
        covers: Whether nothing of what was there before is left.
    """

    write: Write
    window: Window
    covers: bool
