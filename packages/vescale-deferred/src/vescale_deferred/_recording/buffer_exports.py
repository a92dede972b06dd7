"""Exported buffers: who looks at deferred tensors through memory, and would they see writes?

``tensor.numpy()`` of a real tensor is another name for its memory: what is written through one is
seen through the other. A deferred tensor can only export a copy. That is as good as long as nobody
writes, so it is checked that nobody has. The words are those of Python's buffer protocol.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from vescale_deferred._tape.tape import Tape
from vescale_deferred._torch_private import plainly
from vescale_deferred.exceptions import CannotDefer

from .user_frame import user_line


@dataclass(frozen=True, slots=True, eq=False)
class _Export:
    """A copy of the values of a tensor that somebody looks at.

    Attributes:
        values: The memory that was exported.
        original: What was in it.
        consumer: Who looks at it; None if that cannot be known.
        line: Where it was asked for.
    """

    values: Tensor
    original: Tensor
    consumer: weakref.ref[object] | None
    line: str

    def is_over(self) -> bool:
        """Whether nobody looks at it any longer."""
        return self.consumer is not None and self.consumer() is None

    def check_unchanged(self) -> None:
        """Raise CannotDefer if the consumer has written to it."""
        with plainly():
            same = torch.equal(_bytes(self.values), _bytes(self.original))
        if not same:
            raise CannotDefer(
                "a tensor was written to through memory that was asked for as an array "
                f"({self.line}), which a deferred one does not have"
            )


class BufferExports:
    """All copies exported in one construction."""

    def __init__(self) -> None:
        self._exports: dict[Tape, list[_Export]] = {}

    def add(self, tape: Tape, values: Tensor, consumer: object) -> None:
        """Note that ``consumer`` looks at ``values`` of a tensor on ``tape``."""
        self._end()
        try:
            reference = weakref.ref(consumer)
        except TypeError:
            reference = None
        with plainly():
            export = _Export(values, values.clone(), reference, user_line())
        self._exports.setdefault(tape, []).append(export)

    def check(self, tape: Tape) -> None:
        """Raise CannotDefer if a write to ``tape`` would not be seen by a consumer."""
        if tape not in self._exports:
            return
        self._end()
        for export in self._exports.get(tape, ()):
            raise CannotDefer(
                f"a tensor is written to while an array ({export.line}) looks at its memory, "
                "which a deferred one does not have"
            )

    def settle(self) -> None:
        """Raise CannotDefer if any consumer has written to what was exported to it."""
        for exports in self._exports.values():
            for export in exports:
                export.check_unchanged()
        self._exports.clear()

    def _end(self) -> None:
        """Forget the exports that are over."""
        for tape, exports in list(self._exports.items()):
            for export in exports:
                if export.is_over():
                    export.check_unchanged()
            kept = [export for export in exports if not export.is_over()]
            if kept:
                self._exports[tape] = kept
            else:
                del self._exports[tape]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as bytes: NaN is not equal to itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
