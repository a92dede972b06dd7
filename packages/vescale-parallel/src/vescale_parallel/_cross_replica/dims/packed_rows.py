"""Packed tensors: what all rows have, one row's behind the other's, of each row as many as it has.

Which elements are whose other tensors of the call say: texts, see [Note: packed rows], or bounds,
see [Note: bounds of rows].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any


class PackedRowsError(ValueError):
    """A call does not tell which rows the elements of a packed tensor are of."""


class PackedRows(ABC):
    """How many elements of a packed dim, the first one, every row has.

    Attributes:
        is_optional: Whether forward takes None where no row has any.
    """

    is_optional: bool = False

    @property
    def is_even(self) -> bool:
        """Whether every row has as many."""
        return False

    @abstractmethod
    def num_rows(self, leaves: Sequence[Any]) -> int:
        """Return how many rows a call has."""

    @abstractmethod
    def lengths(self, leaves: Sequence[Any], index: int) -> tuple[int, ...]:
        """Return how many elements every row has in a leaf of a call.

        Raises:
            PackedRowsError: If the call does not tell.
        """


def is_packed(found: Sequence[tuple[int, Any]]) -> bool:
    """Whether any leaf is said to be packed."""
    return any(isinstance(rows, PackedRows) for _, rows in found)


def num_rows_of_packed(leaves: Sequence[Any], found: Iterable[Any]) -> int | None:
    """Return how many rows a call has, if it has packed leaves."""
    packed = (rows for rows in found if isinstance(rows, PackedRows))
    return next((rows.num_rows(leaves) for rows in packed), None)
