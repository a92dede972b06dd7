"""Who looks at the values of deferred tensors through memory, and would they see writes?

``tensor.numpy()`` of a real tensor is another name for its memory: what is written through one is
seen through the other. A deferred tensor can only lend a copy. That is as good as long as nobody
writes, so it is checked that nobody has.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from vescale_deferred._tape.tape import Tape
from vescale_deferred._torch_private import plainly
from vescale_deferred.exceptions import CannotDefer

from .user_frame import line_of


@dataclass(frozen=True, slots=True, eq=False)
class _Loan:
    """A copy of the values of a tensor that somebody looks at.

    Attributes:
        values: The memory that was lent.
        original: What was in it.
        borrower: Who looks at it; None if that cannot be known.
        line: Where it was asked for.
    """

    values: Tensor
    original: Tensor
    borrower: weakref.ref[object] | None
    line: str

    def is_over(self) -> bool:
        """Whether nobody looks at it any longer."""
        return self.borrower is not None and self.borrower() is None

    def check_unchanged(self) -> None:
        """Raise CannotDefer if the borrower has written to it."""
        with plainly():
            same = torch.equal(_bytes(self.values), _bytes(self.original))
        if not same:
            raise CannotDefer(
                "a tensor was written to through memory that was asked for as an array "
                f"({self.line}), which a deferred one does not have"
            )


class Loans:
    """All copies lent in one construction."""

    def __init__(self) -> None:
        self._loans: dict[Tape, list[_Loan]] = {}

    def add(self, tape: Tape, values: Tensor, borrower: object) -> None:
        """Note that ``borrower`` looks at ``values`` of a tensor on ``tape``."""
        self._end()
        try:
            reference = weakref.ref(borrower)
        except TypeError:
            reference = None
        with plainly():
            loan = _Loan(values, values.clone(), reference, line_of())
        self._loans.setdefault(tape, []).append(loan)

    def check(self, tape: Tape) -> None:
        """Raise CannotDefer if a write to ``tape`` would not be seen by a borrower."""
        if tape not in self._loans:
            return
        self._end()
        for loan in self._loans.get(tape, ()):
            raise CannotDefer(
                f"a tensor is written to while an array ({loan.line}) looks at its memory, which "
                "a deferred one does not have"
            )

    def settle(self) -> None:
        """Raise CannotDefer if any borrower has written to what it was lent."""
        for loans in self._loans.values():
            for loan in loans:
                loan.check_unchanged()
        self._loans.clear()

    def _end(self) -> None:
        """Forget the loans that are over."""
        for tape, loans in list(self._loans.items()):
            for loan in loans:
                if loan.is_over():
                    loan.check_unchanged()
            kept = [loan for loan in loans if not loan.is_over()]
            if kept:
                self._loans[tape] = kept
            else:
                del self._loans[tape]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as bytes: NaN is not equal to itself."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
